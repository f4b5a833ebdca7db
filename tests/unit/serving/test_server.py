"""The protocol of OpenAI, asked by plain HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from caldera.rollout import HFRollout
from caldera.serving import Recorder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "Why?"}]
SHORT = {"max_tokens": 24, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
Serve = Callable[..., Any]


def events(served: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as it should."""
    reply = served.ask(path, {**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_says_what_a_whole_answer_says(served: Any) -> None:
    asked = {"messages": ASKED, "seed": 3, "n": 3, "logprobs": True, "return_token_ids": True}
    whole = served.chat(**asked, **SHORT)
    chunks = events(served, CHAT, asked | SHORT | {"stream_options": {"include_usage": True}})
    *pieces, last = chunks
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(piece["usage"] is None for piece in pieces)
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        mine = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"]
        said = [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]]
        assert said == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert len(mine) > 10, "it comes in pieces"
    assert whole["usage"]["completion_tokens"] == 72


def test_text_completions_stream_too(served: Any) -> None:
    asked = {"prompt": [[5, 6, 7], [8, 9]], "seed": 1, "logprobs": 0, "return_token_ids": True}
    whole = served.ask(TEXT, asked | SHORT).json()
    chunks = [
        choice for chunk in events(served, TEXT, asked | SHORT) for choice in chunk["choices"]
    ]
    for choice in whole["choices"]:
        mine = [c for c in chunks if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        log_probs = [p for c in mine if c["logprobs"] for p in c["logprobs"]["token_logprobs"]]
        assert log_probs == choice["logprobs"]["token_logprobs"]
        told = [c.get("prompt_token_ids") for c in mine]  # once, however many pieces there are
        assert told == [choice["prompt_token_ids"]] + [None] * (len(mine) - 1)
    assert [c["prompt_token_ids"] for c in whole["choices"]] == [[5, 6, 7], [8, 9]]


def test_a_stream_never_shows_a_stop_string(served: Any) -> None:
    whole = served.chat(ASKED, seed=4, **SHORT)["choices"][0]["message"]["content"]
    readable = [part for part in whole.split("\ufffd") if len(part) > 3]
    stop = max(readable, key=len)[1:4]
    asked = {"messages": ASKED, "seed": 4, "stop": [stop], **SHORT}
    chunks = events(served, CHAT, asked)
    told = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert told == whole[: whole.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_text_of_a_completion_may_keep_its_stop_string(served: Any) -> None:
    asked = {"prompt": [5, 6, 7], "seed": 4, **SHORT}
    whole = served.ask(TEXT, asked).json()["choices"][0]["text"]
    stop = max((part for part in whole.split("\ufffd")), key=len)[1:3]
    assert len(stop) == 2
    asked |= {"stop": [stop], "include_stop_str_in_output": True}
    text = served.ask(TEXT, asked).json()["choices"][0]["text"]
    assert text == whole[: whole.index(stop)] + stop
    assert "".join(c["choices"][0]["text"] for c in events(served, TEXT, asked)) == text
    assert served.ask(CHAT, {**asked, "messages": ASKED}).status_code == 400


def test_a_sampler_that_has_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setattr("caldera.serving.server.SECONDS_TO_REPORT", 0.0)
    monkeypatch.setattr(served.rollout, "step", lambda: 1 / 0)
    assert served.ask(CHAT, {"messages": ASKED}).status_code == 500
    health = served.ask("/health")
    assert (health.status_code, "ZeroDivisionError" in health.text) == (503, True)
    served.server.metrics.running.add()  # as if its answer were still on its way
    account = served.server.close(seconds=0)
    assert (account.refused, account.lost) == (0, 2)


def test_what_a_sampler_refuses_has_a_status(served: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(served.rollout, "decode", None)  # so that it cannot look for strings
    for streams in (False, True):
        body = {"messages": ASKED, "stop": "x", "stream": streams}
        reply = served.ask(CHAT, body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert served.metric("requests_running") == 0


def test_a_sampler_of_whole_batches(serve: Serve) -> None:
    served, native = serve(kind=HFRollout), serve()
    greedy = {"messages": ASKED, "temperature": 0, **SHORT}
    expected = native.chat(**greedy)["choices"][0]["message"]["content"]
    assert served.chat(**greedy)["choices"][0]["message"]["content"] == expected
    chunks = events(served, CHAT, greedy)
    told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert told == expected
    # what it has no means for is the mistake of that request alone
    reply = served.ask(CHAT, {"messages": ASKED, "presence_penalty": 1})
    assert reply.status_code == 400
    assert (
        "presence_penalty=1.0: takes rollout.name=native, vllm" in reply.json()["error"]["message"]
    )
    assert served.chat(**greedy)["choices"][0]["message"]["content"] == expected


def test_what_is_likely_comes_whole(served: Any) -> None:
    asked = {"messages": ASKED, "seed": 3, "logprobs": True, "top_logprobs": 2} | SHORT
    _, only, last = events(served, CHAT, asked)
    content = only["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * 24
    assert last["choices"][0]["finish_reason"] == "length"


def test_parameters_reach_the_sampler(served: Any) -> None:
    greedy = served.chat(ASKED, temperature=0, **SHORT)["choices"][0]["message"]
    for same in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert served.chat(ASKED, **same, **SHORT)["choices"][0]["message"] == greedy
    for other in ({"repetition_penalty": 5.0}, {"presence_penalty": 2.0}):
        assert (
            served.chat(ASKED, temperature=0, **other, **SHORT)["choices"][0]["message"] != greedy
        )
    told = served.chat(ASKED, temperature=0, return_token_ids=True, **SHORT)["choices"][0]
    third = told["token_ids"][2]
    ended = served.chat(
        ASKED, temperature=0, return_token_ids=True, stop_token_ids=[third], max_tokens=24
    )["choices"][0]
    assert ended["token_ids"] == told["token_ids"][: told["token_ids"].index(third) + 1]
    assert ended["finish_reason"] == "stop"


def test_requests_without_a_seed_differ(serve: Serve) -> None:
    served = serve(seed=7)
    first, second = (served.chat(ASKED, **SHORT)["choices"][0]["message"] for _ in range(2))
    assert first != second
    in_session = [served.chat(ASKED, session_id="a", **SHORT)["choices"][0] for _ in range(2)]
    again = serve(seed=7)
    same = [again.chat(ASKED, session_id="a", **SHORT)["choices"][0] for _ in range(2)]
    assert in_session == same
    assert same[0] != same[1]


def test_tools_go_in_and_calls_come_out(scripted: Serve) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    broken = '<tool_call>{"name": </tool_call>'
    texts = [f"Let me see.\n{call}{call}", broken, call, call, "plain"]
    served = scripted(texts)
    tools = {"tools": [TOOL], "return_token_ids": True}
    answer = served.chat(ASKED, **tools)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    prompt = served.tokenizer.decode(answer["prompt_token_ids"])
    assert '"description": "Adds."' in prompt
    # a call that cannot be read is shown as it is
    (choice,) = served.chat(ASKED, **tools)["choices"]
    assert choice["message"] == {"role": "assistant", "content": broken}
    assert choice["finish_reason"] == "stop"
    assert served.metric("malformed_tool_calls_total") == 1
    # without tools nothing is looked for, and none are told of
    for without in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = served.chat(ASKED, return_token_ids=True, **without)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": call}
        assert "Adds." not in served.tokenizer.decode(answer["prompt_token_ids"])
    chunks = events(served, CHAT, {"messages": ASKED, "tools": [TOOL]})
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "plain", None]


def test_calls_of_tools_in_a_stream(scripted: Serve) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    served = scripted([call + call])
    _, said, last = events(served, CHAT, {"messages": ASKED, "tools": [TOOL]})
    calls = said["choices"][0]["delta"]["tool_calls"]
    assert [call["index"] for call in calls] == [0, 1]
    assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("path", "body", "status", "problem", "field"),
    [
        (CHAT, b"{", 400, "not JSON", None),
        (CHAT, b"", 400, "not JSON", None),
        (CHAT, b"\xff\xfe", 400, "not JSON", None),
        (CHAT, b'{"messages": "\\ud800"}', 400, "not JSON", None),
        (CHAT, b"[" * 99_999, 400, "nested deeper than 100", None),
        (CHAT, b"[]", 400, "JSON object", None),
        (CHAT, {"messages": []}, 400, "messages must be a list", None),
        (CHAT, {"messages": [{"role": "user", "content": "z" * 3000}]}, 400, "1 to 767", None),
        (CHAT, {"messages": [{"role": "user", "content": "z" * 2**20}]}, 400,
         " characters: has more tokens than 767", None),
        (TEXT, {"prompt": ["z" * 2**20]}, 400, "a prompt of 1048576 characters: has more", None),
        (TEXT, {"prompt": [5] * 900}, 400, "a prompt of 900 tokens: takes from 1 to 767", None),
        (TEXT, {"prompt": [[5]] * 99, "n": 128}, 400, "takes 2048 responses a request", "n"),
        (TEXT, {"prompt": [5] * 756, "max_tokens": 13}, 400, "max_tokens=13: takes", "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "takes {'type': 'text', ...}", None),
        (CHAT, {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"function": 1}]}]}, 400,
         "has no function with a name", None),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "must be a string", None),
    ],
)  # fmt: skip
def test_errors_have_the_shape_of_openai(
    served: Any, path: str, body: Any, status: int, problem: str, field: str | None
) -> None:
    for streams in (False, True):
        asked = body | {"stream": True} if streams and isinstance(body, dict) else body
        assert_refused(served.ask(path, asked), status, problem, field)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("audio", {}, "there is no such field; takes chat_template_kwargs, "),
        ("best_of", 2, "best_of=2: there is no such field"),
        ("chat_template_kwargs", {"tokenize": 1}, "tokenize"),
        ("chat_template_kwargs", {"continue_final_message": True}, "continue_final_message"),
        ("frequency_penalty", 2.5, "takes numbers from -2 to 2"),
        ("logit_bias", {"5": 100}, "nothing but {} can be honoured"),
        ("max_completion_tokens", 0, "takes whole numbers from 1"),
        ("max_tokens", 5, "max_tokens=5: but max_completion_tokens=4; takes one of them"),
        ("model", "other", "model='other': takes 'tiny'"),
        ("n", 129, "takes whole numbers from 1 to 128"),
        ("parallel_tool_calls", False, "takes true"),
        ("response_format", {"type": "json_object"}, "nothing but {'type': 'text'} can be"),
        ("seed", 1.5, "takes whole numbers"),
        ("session_id", "", "session_id=''"),
        ("stop", ["a"] * 17, "up to 16 texts"),
        ("stop_token_ids", 3, "takes a list of tokens"),
        ("stop_token_ids", [10**9], "takes tokens from 0 to"),
        ("stop_token_ids", [7], "no token ends a response with ignore_eos=true"),
        ("store", True, "nothing but False can be honoured"),
        ("stream_options", {"x": 1}, "takes include_usage"),
        ("temperature", 5, "takes numbers from 0 to 2"),
        ("tool_choice", "required", "no call can be forced"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}, "no call can be forced"),
        ("tools", [{**TOOL, "type": "retrieval"}], "takes a list of {'type': 'function'"),
        ("top_k", 0.5, "top_k=0.5: takes whole numbers"),
        ("top_logprobs", 2, "needs logprobs=true"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(
    served: Any, field: str, value: Any, problem: str
) -> None:
    others = {"stop_token_ids": {"ignore_eos": value == [7]}}
    others["max_tokens"] = {"max_completion_tokens": 4}
    asked = {"messages": ASKED, **others.get(field, {}), field: value}
    body = json.dumps(asked).encode()
    assert_refused(served.ask(CHAT, body), 404 if field == "model" else 400, problem, field)


def assert_refused(
    reply: httpx2.Response, status: int, problem: str, field: str | None = None
) -> None:
    error = reply.json()["error"]
    assert reply.status_code == status
    assert problem in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert error["code"] == status


def test_what_asks_for_nothing_is_no_mistake(served: Any) -> None:
    asked = {"messages": ASKED, "temperature": 0, **SHORT}
    neutral = {
        "logit_bias": {}, "modalities": ["text"], "response_format": {"type": "text"},
        "service_tier": "auto", "store": False, "audio": None, "max_completion_tokens": 24,
    }  # fmt: skip
    assert served.chat(**asked, **neutral)["choices"] == served.chat(**asked)["choices"]
    text = {"prompt": "The", "temperature": 0, **SHORT}
    plain, same = (served.ask(TEXT, text | more).json() for more in ({}, {"echo": False}))
    assert plain["choices"] == same["choices"]
    assert_refused(served.ask(TEXT, {**text, "echo": True}), 400, "nothing but False", "echo")


def test_paths_and_methods(serve: Serve) -> None:
    served = serve()
    for method, path, status, problem in (
        ("GET", CHAT, 405, f"GET {CHAT}: takes POST"),
        ("PUT", TEXT, 405, "takes POST"),
        ("PURGE", "/metrics", 405, "takes GET"),
        ("POST", "/v1/embeddings", 404, "there is no such path; takes /v1/chat/completions"),
        ("GET", "/v1/models/other", 404, "there is no such path"),
        ("GET", "/%ff?x=1", 404, "there is no such path"),
    ):
        assert_refused(served.ask(path, method=method), status, problem)
    head = served.ask("/health", method="HEAD")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("50%25?", "a/b c"):
        served.chat(ASKED, session_id=name, **SHORT)
        assert served.ask(f"/sessions/{quote(name, safe='')}").json()["session"] == name


def test_bodies_that_are_too_large_or_end_early(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("caldera.web.MAX_REQUEST_BYTES", 2**20)
    served = serve()
    body = json.dumps({"messages": ASKED, "user": "x" * 2**23}).encode()
    assert_refused(served.ask(CHAT, body), 413, f"may have {2**20} bytes, not {len(body)}")
    host, port = served.server.address.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert served.chat(ASKED, **SHORT)["choices"]
    assert "Traceback" not in caplog.text


def test_a_large_request_does_not_hold_up_others(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is made in another thread than that which answers."""
    threads = []
    plain = served.server._prompts.tokens

    def tokens(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plain(*arguments)

    monkeypatch.setattr(served.server._prompts, "tokens", tokens)
    served.chat(ASKED, **SHORT)
    long = [{"role": "user", "content": "z" * 2**17}]
    assert served.ask(CHAT, {"messages": long}).status_code == 400
    assert threads[0] == served.server.address != threads[1]


def test_a_mistake_of_the_server_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    monkeypatch.setattr(served.server._prompts, "tokens", lambda *_: 1 / 0)
    for streams in (False, True):
        reply = served.ask(CHAT, {"messages": ASKED, "stream": streams})
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (500, "server_error")
        assert error["message"] == "ZeroDivisionError: division by zero"
    assert caplog.text.count(f"POST {CHAT} failed") == 2
    assert served.metric("requests_lost_total") == 2
    assert served.metric("requests_running") == 0


def test_a_template_that_fails_is_the_messages_mistake(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages[0].content.index('x') }}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    problem = "the chat template failed on the messages: ValueError: substring not found"
    assert_refused(served.ask(CHAT, {"messages": ASKED}), 400, problem)


def test_a_part_of_a_character_has_no_bytes(served: Any) -> None:
    (choice,) = served.chat(ASKED, seed=4, logprobs=True, **SHORT)["choices"]
    tokens = choice["logprobs"]["content"]
    assert {token["bytes"] is None for token in tokens} == {True, False}
    for token in tokens:
        assert token["bytes"] == (
            None if "\ufffd" in token["token"] else list(token["token"].encode())
        )


def test_health_models_and_metrics(serve: Serve) -> None:
    served = serve()
    assert served.ask("/health").status_code == 200
    assert [model["id"] for model in served.ask("/v1/models").json()["data"]] == ["tiny"]
    assert served.ask("/v1/models/tiny").json()["id"] == "tiny"
    assert served.ask("/v1/models/other").status_code == 404
    assert served.ask("/nowhere").status_code == 404
    served.chat(ASKED, **SHORT)
    served.ask(CHAT, b"{")
    text = served.ask("/metrics").text
    assert 'caldera_requests_total{path="/v1/chat/completions",status="200"} 1' in text
    assert 'caldera_requests_total{path="/v1/chat/completions",status="400"} 1' in text
    assert 'caldera_request_seconds_bucket{le="+Inf"} 1' in text
    assert served.metric("generated_tokens_total") == 24
    assert served.metric("requests_running") == 0
    served.server.turn_away("it is late")
    assert served.ask("/health").status_code == 503
    assert served.ask(CHAT, {"messages": ASKED}).json()["error"]["message"] == "it is late"
    served.server.accept()
    assert served.ask("/health").status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_frees_the_sampler(serve: Serve, streams: bool) -> None:
    served = serve()
    asked = {"messages": ASKED, "max_tokens": 600, "ignore_eos": True, "stream": streams, "n": 8}
    url = f"http://{served.server.address}{CHAT}"
    if streams:
        with httpx2.stream("POST", url, json=asked) as reply:
            next(reply.iter_bytes())
    else:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(url, json=asked, timeout=0.05)
    wait_until(lambda: served.metric("requests_cancelled_total") == 1)
    wait_until(lambda: not served.rollout.has_work())
    assert served.metric("requests_running") == 0
    assert served.metric("generated_tokens_total") == 0


def test_closing_finishes_or_tells(serve: Serve) -> None:
    served = serve()
    answers: list[httpx2.Response] = []

    def ask(**fields: Any) -> threading.Thread:
        body = {"messages": ASKED, "ignore_eos": True, **fields}
        thread = threading.Thread(target=lambda: answers.append(served.ask(CHAT, body)))
        thread.start()
        return thread

    asking = [ask(max_tokens=600, n=8, stream=True), ask(max_tokens=600, n=8)]
    wait_until(lambda: served.server.metrics.running.total() == 2)
    asking.append(ask(max_tokens=1))
    wait_until(lambda: served.server.metrics.requests.total() == 1)
    account = served.server.close(seconds=0)
    for thread in asking:
        thread.join()
    assert (account.answered, account.cut_off, account.cancelled, account.lost) == (1, 2, 0, 0)
    told = sorted(reply.status_code for reply in answers if "data:" not in reply.text)
    assert told in ([200, 503], [200, 503, 503])  # the stream may not have begun
    assert sum("the server is shutting down" in reply.text for reply in answers) == 2
    assert not any("[DONE]" in reply.text for reply in answers)


def test_sessions_are_shown_and_forgotten(serve: Serve) -> None:
    served = serve(recorder=Recorder(most_sessions=2))
    for name in ("a/b", "b", "c"):
        served.chat(ASKED, session_id=name, **SHORT)
    served.ask(CHAT, {"messages": ASKED, **SHORT}, **{"x-session-id": "b"})
    assert served.ask("/sessions").json() == {"sessions": ["c", "b"]}
    assert served.metric("sessions_forgotten_total") == 1
    shown = served.ask("/sessions/b").json()
    assert [turn["request"] for turn in shown["requests"]] == [1, 2]
    assert [len(each["response_ids"]) for each in shown["trajectories"]] == [24, 24]
    assert served.ask("/sessions/b", method="DELETE").status_code == 200
    assert served.ask("/sessions/b").status_code == 404
    assert served.ask("/sessions/b", method="DELETE").status_code == 404


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)
