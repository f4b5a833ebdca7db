"""Sessions: what was sampled stays what it is, in the chat templates of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caldera.serving import Recorder, Trajectory, Turn
from caldera.serving.conversations import Chat, ChatPrompts, Sampled
from caldera.serving.recording import trajectories_of

SHORT = {"max_tokens": 20, "temperature": 1.0}
FIRST = {"role": "user", "content": "Why?"}
SECOND = {"role": "user", "content": "And then?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
Serve = Callable[..., Any]


def sampled_parts(trajectory: Trajectory) -> list[int]:
    pairs = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
    return [token for token, mask in pairs if mask]


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "smollm2"])
def test_a_conversation_is_one_trajectory_of_its_sampled_tokens(
    serve: Serve, template: str
) -> None:
    served = serve(template)
    messages: list[dict[str, Any]] = [FIRST]
    answers = []
    for question in (SECOND, FIRST, None):
        answer = served.chat(
            messages, session_id="s", logprobs=True, return_token_ids=True, **SHORT
        )
        answers.append(answer)
        messages.append(answer["choices"][0]["message"])
        if question:
            messages.append(question)
    (trajectory,) = served.server.trajectories("s")
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert sampled_parts(trajectory) == [token for each in tokens for token in each]
    # text that is encoded again would be other tokens, so this shows something
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert [served.tokenizer.encode(text) for text in texts] != tokens
    last = answers[-1]
    assert (
        trajectory.prompt_ids + trajectory.response_ids
        == last["prompt_token_ids"] + last["choices"][0]["token_ids"]
    )
    log_probs = [t["logprob"] for a in answers for t in a["choices"][0]["logprobs"]["content"]]
    pairs = zip(trajectory.log_probs, trajectory.response_mask, strict=True)
    assert [log_prob for log_prob, mask in pairs if mask] == log_probs
    assert all(
        (log_prob == 0.0 and version == -1) if not mask else version == 0
        for log_prob, mask, version in zip(
            trajectory.log_probs, trajectory.response_mask, trajectory.weight_versions, strict=True
        )
    )
    assert (trajectory.turns, trajectory.finish_reason) == (
        3,
        answers[-1]["choices"][0]["finish_reason"],
    )
    assert served.metric("answers_encoded_again_total") == 0


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "smollm2"])
def test_prompts_are_those_of_the_template(scripted: Serve, template: str) -> None:
    """Where tokens of text are what was sampled, all is as if there were no session."""
    texts = ["One.", "Two.", "Three."]
    served, plain = scripted(texts, template), scripted(texts, template)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, FIRST]
    for _ in texts:
        asked = {"messages": messages, "return_token_ids": True}
        one, other = served.chat(session_id="s", **asked), plain.chat(**asked)
        assert one["prompt_token_ids"] == other["prompt_token_ids"]
        messages = [*messages, one["choices"][0]["message"], SECOND]
    assert len(served.server.trajectories("s")) == 1


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3"])
def test_calls_of_tools_keep_their_tokens(scripted: Serve, template: str) -> None:
    odd = CALL.replace('": ', '" :  ')  # as no template writes it
    served = scripted([f" Hm.  {odd}", "It is 3."], template)
    asked = {"tools": TOOLS, "session_id": "s", "return_token_ids": True}
    first = served.chat([FIRST], **asked)
    said = first["choices"][0]["message"]
    assert said["content"] == "Hm."
    (call,) = said["tool_calls"]
    shown = {**said, "refusal": None, "annotations": None}  # as OpenAI's client has them
    result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    second = served.chat([FIRST, shown, result], **asked)
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before
    between = served.tokenizer.decode(second["prompt_token_ids"][len(before) :])
    assert "<tool_response>\n3\n</tool_response>" in between
    assert len(served.server.trajectories("s")) == 1


def test_another_beginning_is_another_trajectory(serve: Serve) -> None:
    served = serve()
    asked = {"session_id": "s", "return_token_ids": True, **SHORT}
    first = served.chat([FIRST], **asked)
    said = first["choices"][0]
    # The client has dropped the question: nothing goes on, and yet the answer keeps its tokens.
    second = served.chat([SECOND, said["message"], FIRST], **asked)
    prompt, tokens = second["prompt_token_ids"], said["token_ids"]
    starts = [i for i in range(len(prompt)) if prompt[i : i + len(tokens)] == tokens]
    assert len(starts) == 1
    assert [each.turns for each in served.server.trajectories("s")] == [1, 1]
    # What another session has said is text like any other.
    third = served.chat([FIRST, said["message"], SECOND], **asked | {"session_id": "t"})
    assert third["prompt_token_ids"][: len(first["prompt_token_ids"]) + len(tokens)] != (
        first["prompt_token_ids"] + tokens
    )
    # Both answers to one question are gone on with.
    pair = served.chat([FIRST], n=2, **asked | {"session_id": "u"})
    for choice in pair["choices"]:
        served.chat([FIRST, choice["message"], SECOND], **asked | {"session_id": "u"})
    assert [each.turns for each in served.server.trajectories("u")] == [2, 2]


def test_tokens_as_prompts_are_recorded(serve: Serve) -> None:
    served = serve()
    asked = {"session_id": "s", "return_token_ids": True, "max_tokens": 4, "ignore_eos": True}
    first = served.ask("/v1/completions", {"prompt": [5, 6, 7], **asked}).json()["choices"][0]
    grown = [5, 6, 7, *first["token_ids"], 8, 9]
    served.ask("/v1/completions", {"prompt": grown, **asked})
    (trajectory,) = served.server.trajectories("s")
    assert trajectory.prompt_ids == [5, 6, 7]
    assert trajectory.response_mask == [1] * 4 + [0] * 2 + [1] * 4


def test_versions_are_recorded(serve: Serve) -> None:
    served = serve()
    served.chat([FIRST], session_id="s", **SHORT)
    served.rollout.version = 3
    served.chat([FIRST], session_id="s", **SHORT)
    old, new = served.server.trajectories("s")
    assert (set(old.weight_versions), set(new.weight_versions)) == ({0}, {3})
    assert served.metric("weight_version") == 3


def test_a_template_that_changes_with_every_turn(serve: Serve) -> None:
    from copy import copy

    served = serve()
    tokenizer = copy(served.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.index }}/{{ messages | length }} {{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    model = replace(served.server._model, tokenizer=tokenizer)
    prompts, sampled = ChatPrompts(model), Sampled()
    assert "cannot have a turn" in str(prompts.cannot_append)
    answer = {"role": "assistant", "content": "Hm"}
    sampled.remember(Chat([FIRST]), answer, [9, 9], [40, 41, 42])
    ids, encoded_again = prompts.tokens(Chat([FIRST, answer, SECOND]), sampled)
    assert tokenizer.decode(ids[:4]).startswith("1/3")
    assert ids[ids.index(40) : ids.index(40) + 3] == [40, 41, 42]
    assert encoded_again == 0


def test_what_a_template_hides_is_counted(serve: Serve) -> None:
    from copy import copy

    served = serve()
    tokenizer = copy(served.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"
        "{% endfor %}="
    )
    model = replace(served.server._model, tokenizer=tokenizer)
    prompts, sampled = ChatPrompts(model), Sampled()
    answer = {"role": "assistant", "content": "Hm"}
    sampled.remember(Chat([FIRST]), answer, [9, 9], [40, 41, 42])
    ids, encoded_again = prompts.tokens(Chat([FIRST, answer, SECOND]), sampled)
    assert (tokenizer.decode(ids), encoded_again) == ("Why?And then?=", 1)


def turn(prompt: list[int], response: list[int], request: int = 1) -> Turn:
    log_probs = [-float(token) for token in response]
    return Turn(request, prompt, response, log_probs, [0] * len(response), "stop", 0.0)


def test_turns_make_trajectories() -> None:
    made = trajectories_of(
        [
            turn([1, 2], [3]),
            turn([1, 2, 3, 4], [5, 6]),
            turn([1, 2, 9], [7]),  # another beginning
            turn([1, 2, 3, 4, 5, 6], [8]),  # nothing in between
            turn([1, 2, 3, 4, 9], [7]),  # a branch, behind what has gone on already
        ]
    )
    assert [(each.prompt_ids, each.response_ids) for each in made] == [
        ([1, 2], [3, 4, 5, 6, 8]),
        ([1, 2, 9], [7]),
        ([1, 2, 3, 4, 9], [7]),
    ]
    assert made[0].response_mask == [1, 0, 1, 1, 1]
    assert made[0].log_probs == [-3.0, 0.0, -5.0, -6.0, -8.0]
    assert [each.turns for each in made] == [3, 1, 1]


def test_a_session_that_was_dropped_takes_no_more() -> None:
    recorder = Recorder()
    recorder.begin("s")
    assert recorder.drop("s")
    recorder.add("s", turn([1], [2]))
    assert recorder.turns("s") is None
    assert recorder.trajectories("s") == []
