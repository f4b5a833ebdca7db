"""A language model behind HTTP: the protocol of OpenAI, against transformers' own `generate`."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from caldera.config import PPOTrainerConfig
from caldera.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.single_controller.in_process import InProcessWorkerGroup
from caldera.workers import RewardModelWorker
from tests.reward_models import save_judge

MESSAGES = [{"role": "user", "content": "What is the sum?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture
def group(load: Callable[..., PPOTrainerConfig], folder: Path) -> Iterator[WorkerGroup]:
    config = load(
        "reward_model.enable=True", f"reward_model.model.path={folder}",
        "reward_model.rollout.name=native", "reward_model.rollout.prompt_length=48",
        "reward_model.rollout.response_length=24", "reward_model.rollout.max_model_len=64",
        "reward_model.rollout.max_num_seqs=4",
    ).reward_model  # fmt: skip
    group = LocalWorkerGroup(ResourcePool((1,)), lambda: RewardModelWorker(config, "cpu"))
    group.init_model()
    yield group
    group.stop_serving()


@pytest.fixture
def address(group: WorkerGroup) -> str:
    (address,) = group.serve()
    group.wake()
    return str(address)


def ask(address: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    """(status, answer) to a POST of the body, or to a GET without one."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def texts(address: str, body: dict[str, Any]) -> list[str]:
    status, answer = ask(address, CHAT, body)
    assert status == 200, answer
    return [choice["message"]["content"] for choice in answer["choices"]]


def test_greedy_answers_are_those_of_transformers(address: str, folder: Path) -> None:
    own: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = own.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    ids = prompt["input_ids"]
    with torch.no_grad():
        written = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False
        )[0, len(ids) :].tolist()  # fmt: skip
    expected = own.decode(written, skip_special_tokens=True)
    status, answer = ask(address, CHAT, GREEDY)
    (choice,) = answer["choices"]
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": expected}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": 12, "total_tokens": len(ids) + 12,
    }  # fmt: skip
    # parts of a message, and the prompt itself in tokens, are the same question
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the sum?"}]}]
    assert texts(address, GREEDY | {"messages": parts}) == [expected]
    plain = {"temperature": 0, "max_tokens": 12}
    status, answer = ask(address, TEXT, {"prompt": [ids, ids], **plain})
    assert [choice["text"] for choice in answer["choices"]] == [expected] * 2
    assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("text_completion", 2 * len(ids))
    text = own.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    bare = text.removeprefix("<s>")  # the tokenizer puts it back
    assert ask(address, TEXT, {"prompt": bare, **plain})[1]["choices"][0]["text"] == expected


def test_samples_can_be_repeated(address: str) -> None:
    drawn = GREEDY | {"temperature": 1.0, "n": 3}
    seeded = texts(address, drawn | {"seed": 5})
    assert len(set(seeded)) == 3
    assert texts(address, drawn | {"seed": 5}) == seeded
    assert texts(address, drawn | {"seed": 6}) != seeded
    plain = texts(address, drawn)  # the prompt is the seed
    with ThreadPoolExecutor(8) as threads:  # more than run at once, in any order
        again = list(threads.map(lambda _: texts(address, drawn), range(8)))
    assert again == [plain] * 8
    other = texts(address, drawn | {"messages": [{"role": "user", "content": "Why?"}]})
    assert other != plain


def test_stop_strings_are_left_out(address: str) -> None:
    (whole,) = texts(address, GREEDY)
    stop = whole[len(whole) // 2]
    _, answer = ask(address, CHAT, GREEDY | {"stop": [stop]})
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 12


def test_log_probs(address: str) -> None:
    _, answer = ask(address, CHAT, GREEDY | {"logprobs": True, "top_logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for token in content:
        best, second = token["top_logprobs"]
        assert best["token"] == token["token"]
        assert second["logprob"] <= best["logprob"] < 0
        assert token["logprob"] == pytest.approx(best["logprob"])
    asked = {"prompt": "The sum", "temperature": 0, "max_tokens": 3, "logprobs": 1}
    _, answer = ask(address, TEXT, asked)
    said = answer["choices"][0]["logprobs"]
    assert [list(top.values()) for top in said["top_logprobs"]] == [
        [pytest.approx(log_prob)] for log_prob in said["token_logprobs"]
    ]


def test_an_answer_is_as_long_as_there_is_room(address: str) -> None:
    for prompt, room in (([3] * 8, 24), ([3] * 48, 16)):  # response_length, max_model_len
        asked = {"prompt": prompt, "temperature": 0}
        assert ask(address, TEXT, asked)[1]["usage"]["completion_tokens"] <= room
        assert ask(address, TEXT, asked | {"max_tokens": room})[0] == 200
        status, answer = ask(address, TEXT, asked | {"max_tokens": room + 1})
        assert (status, answer["error"]["message"]) == (
            400, f"max_tokens={room + 1}: takes whole numbers from 1 to {room}",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (CHAT, b"{", "not JSON"),
        (CHAT, b"[" * 100_000, "nested deeper than 100"),
        (CHAT, b"[]", "JSON object"),
        (CHAT, {}, "messages must be a list of messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "the content of message 0"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of a"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
        (CHAT, {"messages": [{"role": "user", "content": "z" * 99}]}, "takes from 1 to 48"),
        (CHAT, GREEDY | {"temperature": -1}, "temperature=-1: takes numbers from 0 to 2"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": ""}], "top_p": NaN}',
            "NaN is no JSON number",
        ),
        (CHAT, GREEDY | {"max_tokens": 0}, "max_tokens=0: takes whole numbers from 1 to 24"),
        (CHAT, GREEDY | {"max_tokens": 10**9}, "max_tokens=1000000000: takes"),
        (CHAT, GREEDY | {"n": True}, "n=True: takes whole numbers from 1 to 128"),
        (CHAT, GREEDY | {"seed": "x"}, "seed='x': takes whole numbers"),
        (CHAT, GREEDY | {"stop": [""]}, "stop=['']"),
        (CHAT, GREEDY | {"stream": 1}, "stream=1: takes true or false"),
        (CHAT, GREEDY | {"logprobs": 3}, "logprobs=3"),
        (CHAT, GREEDY | {"top_logprobs": 3}, "top_logprobs=3: needs logprobs=true"),
        (CHAT, GREEDY | {"tools": [1]}, "tools=[1]: takes a list of "),
        (TEXT, {"prompt": []}, "prompt must be"),
        (TEXT, {"prompt": [1, "x"]}, "prompt must be"),
        (TEXT, {"prompt": [[1], []]}, "a prompt of 0 tokens"),
        (TEXT, {"prompt": [1, 5000]}, "token 5000: the model knows 0 to "),
        (TEXT, {"prompt": "x", "logprobs": 99}, "logprobs=99"),
    ],
)
def test_what_cannot_be_answered_is_told(address: str, path: str, body: Any, problem: str) -> None:
    status, answer = ask(address, path, body)
    assert (status, answer["error"]["code"]) == (400, 400)
    assert problem in answer["error"]["message"]


def test_what_else_there_is(address: str, folder: Path) -> None:
    _, models = ask(address, "/v1/models")
    assert [model["id"] for model in models["data"]] == [str(folder)]
    assert ask(address, "/health") == (200, {})
    assert ask(address, CHAT)[0] == 405
    assert ask(address, "/classify", {"input": [3]})[0] == 404


def test_a_model_that_sleeps_turns_requests_away(group: WorkerGroup) -> None:
    (address,) = group.serve()  # it shares its device: it sleeps until it is woken
    assert (ask(address, "/health")[0], ask(address, CHAT, GREEDY)[0]) == (503, 503)
    group.wake()
    expected = texts(address, GREEDY)
    group.sleep()
    assert ask(address, CHAT, GREEDY)[0] == 503
    group.wake()
    assert texts(address, GREEDY) == expected


def test_sleep_ends_what_is_being_written(
    group: InProcessWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (address,) = group.serve()
    worker: Any = group.workers[0]
    server = worker.server
    rollout, began = server._rollout, threading.Event()
    step = rollout.step

    def watched() -> None:
        step()
        began.set()

    group.wake()
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(rollout, "step", watched)
        many = {"prompt": [[3] * 8] * 8, "n": 8, "max_tokens": 24}
        answer = threads.submit(ask, address, TEXT, many)
        began.wait(20)
        group.sleep()
        assert rollout.cache_bytes == 0
        assert answer.result()[0] == 503
    group.wake()
    assert ask(address, CHAT, GREEDY)[0] == 200
