"""Tool calls and interactions: which tokens a trajectory has, whose they are, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from caldera.errors import DataError, UnsupportedError
from caldera.interactions.base import BaseInteraction
from caldera.interactions.scripted import ScriptedInteraction
from caldera.tools import ToolResponse
from caldera.tools.formats import FunctionCall, ToolParser
from caldera.tools.function_tool import tools_of
from tests.unit.agent_loop import agent_scripts
from tests.unit.agent_loop.agent_scripts import CALL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tests.unit.agent_loop.agent_scripts import Run

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def spoken(output: Any, tokenizer: Any) -> tuple[str, str]:
    """(what the policy said, what it was told)."""
    said = [i for i, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    told = [
        i for i, mask in zip(output.response_ids, output.response_mask, strict=True) if not mask
    ]
    return tokenizer.decode(said), tokenizer.decode(told)


def test_a_call_is_answered_and_the_answer_is_not_the_policys(
    run: Run, tokenizer: PreTrainedTokenizerFast
) -> None:
    output, script = run(f"{CALL}<eos>", "It is 42.<eos>")
    said, told = spoken(output, tokenizer)
    assert said == f"{CALL}<eos>It is 42.<eos>"
    assert told == "<|t|>42<eos><|a|>"
    assert output.num_turns == 4
    assert output.tool_calls == {"add/ok": 1}
    assert output.extra_fields == {"turn_scores": [], "tool_rewards": [0.25]}
    # The second turn follows the very tokens of the first.
    first = output.prompt_ids + output.response_ids
    assert script.prompts[1] == first[: len(script.prompts[1])]
    whole = [
        {"role": "user", "content": "20+22?"}, {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."},
    ]  # fmt: skip
    shown = tokenizer.apply_chat_template(whole, tokenize=False)
    assert tokenizer.decode(first) == f"<|s|>add <eos>{shown}"


def test_the_metrics_of_a_tool_do_not_hide_how_its_call_went(run: Run) -> None:
    _, script = run(f"{CALL}<eos>", "42<eos>")
    (event,) = (event for event in script.timeline.events if event["kind"] == "tool")
    (call,) = event["calls"]
    assert (call["name"], call["status"]) == ("add", "ok")
    assert call["metrics"] == {"status": "added"}


def test_a_parser_that_has_only_what_verls_have(
    run: Run, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plus(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int]) -> Any:
            text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=True))
            before, plus, after = text.partition("+")
            if not plus:
                return text, []
            return "", [FunctionCall("add", json.dumps({"a": int(before), "b": int(after)}))]

    monkeypatch.setattr(agent_scripts, "Hermes", Plus)
    output, _ = run("20+22<eos>", "42<eos>")
    assert spoken(output, tokenizer) == ("20+22<eos>42<eos>", "<|t|>42<eos><|a|>")
    with pytest.raises(UnsupportedError, match=r"Plus .* has no parse_text"):
        Plus(tokenizer).parse_text("20+22")


def test_log_probs_are_those_of_the_sampled_tokens_and_zero_elsewhere(run: Run) -> None:
    output, _ = run(f"{CALL}<eos>", "42<eos>")
    assert output.response_logprobs is not None
    first = len(CALL) + 1
    expected = [-0.5 - 0.001 * i for i in range(first)] + [0.0] * 5 + [-0.5, -0.501, -0.502]
    assert output.response_logprobs == expected
    assert output.response_mask == [1] * first + [0] * 5 + [1] * 3


def test_what_was_thought_and_cut_off_stays_as_it_was_sampled(run: Run, tokenizer: Any) -> None:
    odd = f"hm  \n\n{CALL}  "  # no end of the turn, and white space that a template would strip
    output, _ = run(odd, "42<eos>")
    assert tokenizer.decode(output.response_ids).startswith(f"{odd}<eos><|t|>42<eos><|a|>42")
    assert output.response_mask[: len(odd)] == [1] * len(odd)
    assert output.response_mask[len(odd)] == 0  # the end of the turn, which was not sampled


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>', "other/malformed"),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "add/malformed"),
        ('<tool_call>{"name": "subtract", "arguments": {}}</tool_call>', "other/unknown"),
    ],
)
def test_calls_that_cannot_be_run_are_told_and_counted(
    run: Run, tokenizer: PreTrainedTokenizerFast, said: str, counted: str
) -> None:
    output, _ = run(
        f"{said}<eos>", "Sorry.<eos>",
        overrides=["data.max_response_length=600", f"{MULTI_TURN}.max_tool_response_length=200"],
    )  # fmt: skip
    assert output.tool_calls == {counted: 1}
    assert "Error when executing tool: " in spoken(output, tokenizer)[1]
    assert output.num_turns == 4


@pytest.mark.parametrize("key", ["max_assistant_turns", "max_user_turns"])
def test_turns_are_limited(run: Run, key: str) -> None:
    calls = [f"{CALL}<eos>"] * 3
    output, script = run(
        *calls, overrides=[f"{MULTI_TURN}.{key}=1", "data.max_response_length=999"]
    )
    assert len(script.prompts) == (1 if key == "max_assistant_turns" else 2)
    assert output.response_mask[-1] == 1


@pytest.mark.parametrize(("room", "turns"), [(4, 1), (6, 2)])
def test_a_tool_that_leaves_no_room_to_answer_is_left_out(run: Run, room: int, turns: int) -> None:
    length = len(CALL) + 1 + room  # the tool's turn takes five tokens
    output, script = run(
        f"{CALL}<eos>", "It is 42.<eos>", overrides=[f"data.max_response_length={length}"]
    )
    assert len(script.prompts) == turns
    assert len(output.response_ids) == (length if turns == 2 else len(CALL) + 1)
    assert output.response_mask[-1] == 1


def test_an_interaction_answers_and_scores_turns(
    run: Run, tokenizer: PreTrainedTokenizerFast
) -> None:
    partner = ScriptedInteraction(
        {"name": "quiz", "turns": [
            {"say": "Are you sure?", "expect": "42", "score": 0.5},
            {"say": "Fine.", "expect": "43", "score": 1.0, "otherwise": -1.0},
        ]}
    )  # fmt: skip
    output, _ = run(
        "42<eos>", "yes<eos>", interactions={"quiz": partner}, interaction_kwargs={"name": "quiz"}
    )
    assert spoken(output, tokenizer) == ("42<eos>yes<eos>", "<|u|>Are you sure?<eos><|a|>")
    assert output.extra_fields["turn_scores"] == [0.5, -1.0]
    assert output.turn_rewards == [(2, 0.5), (len(output.response_ids) - 1, -1.0)]
    assert partner._scripts == {}, "the conversation is over"


class Examiner(BaseInteraction):
    """Scores only the second answer, the last one."""

    async def generate_response(
        self, instance_id: str, messages: Sequence[Any], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        is_over = sum(message["role"] == "assistant" for message in messages) == 2
        return is_over, "more", -1.0 if is_over else None, {}


def test_a_turn_without_a_score_has_none(run: Run) -> None:
    output, script = run(
        "1<eos>", "2<eos>", interactions={"quiz": Examiner({"name": "quiz"})},
        interaction_kwargs={"name": "quiz"},
    )  # fmt: skip
    assert output.extra_fields["turn_scores"] == [-1.0]
    assert output.turn_rewards == [(len(output.response_ids) - 1, -1.0)]
    assert output.tool_calls == {}, "nothing went wrong"
    told = [event["score"] for event in script.timeline.events if event["kind"] == "user"]
    assert told == [None, -1.0]


def test_the_reward_of_a_tool_lies_on_the_turn_that_called_it(run: Run) -> None:
    output, _ = run(f"{CALL}<eos>", "42<eos>")
    assert output.turn_rewards == [(len(CALL), 0.25)]


def test_calls_without_a_reward_give_their_turn_none(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def execute(*args: Any, **kwargs: Any) -> Any:
        return ToolResponse("42"), None, {}

    (tool,) = tools_of(agent_scripts)
    monkeypatch.setattr(tool, "execute", execute)
    output, _ = run(f"{CALL}<eos>", "42<eos>")
    assert (output.extra_fields["tool_rewards"], output.turn_rewards) == ([], [])


def test_a_row_names_its_interaction(run: Run) -> None:
    partner = ScriptedInteraction({"name": "quiz", "turns": [{"say": "?"}]})
    with pytest.raises(DataError, match=r"interaction_kwargs\.name of a row is 'chess'.*quiz"):
        run("1<eos>", interactions={"quiz": partner}, interaction_kwargs={"name": "chess"})


def test_an_interaction_ends_even_if_the_loop_fails(run: Run) -> None:
    partner = ScriptedInteraction({"name": "quiz", "turns": [{"say": "?"}, {"say": "?"}]})
    with pytest.raises(IndexError):  # the script of the policy has no second turn
        run("1<eos>", interactions={"quiz": partner}, interaction_kwargs={"name": "quiz"})
    assert partner._scripts == {}


class Failing(BaseInteraction):
    """Fails in the method of that name, and otherwise asks for more."""

    def __init__(self, method: str, how: Any = None) -> None:
        super().__init__({"name": "quiz", "timeout": 0.05})
        self._method, self._how = method, how

    async def _act(self, method: str) -> Any:
        if method == self._method:
            if callable(self._how):
                return await self._how()
            if isinstance(self._how, BaseException):
                raise self._how
            return self._how
        return {"start": "id", "answer": (False, "more", 0.5, {}), "end": None}[method]

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return str(await self._act("start"))

    async def generate_response(
        self, instance_id: str, messages: Sequence[Any], **kwargs: Any
    ) -> Any:
        return await self._act("answer")

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self._act("end")


@pytest.mark.parametrize(
    ("method", "how", "outcome", "told"),
    [
        ("start", LookupError("no room"), {"error": 1}, ""),
        ("answer", LookupError("no room"), {"error": 1}, "no room"),
        ("answer", SystemExit(3), {"error": 1}, "3"),
        ("answer", asyncio.Event().wait, {"timeout": 1}, "no answer within 0.05 s"),
        ("answer", None, {"error": 1}, "must return (is over, text, score, dict)"),
        ("answer", (False, 7, 0.0, {}), {"error": 1}, "must be text"),
        ("answer", (False, "a", float("nan"), {}), {"error": 1}, "not finite"),
        ("end", LookupError("no room"), {"error": 1}, "more"),
    ],
)
def test_an_interaction_that_fails_is_told_and_counted(
    run: Run, tokenizer: PreTrainedTokenizerFast, method: str, how: Any, outcome: dict[str, int],
    told: str,
) -> None:  # fmt: skip
    output, _ = run(
        "1<eos>", "2<eos>", interactions={"quiz": Failing(method, how)},
        interaction_kwargs={"name": "quiz"},
        overrides=[f"{MULTI_TURN}.max_user_turns=1", "data.max_response_length=600"],
    )  # fmt: skip
    said, heard = spoken(output, tokenizer)
    assert output.tool_calls == {f"interaction.quiz/{key}": n for key, n in outcome.items()}
    if method == "start":
        assert (said, heard) == ("1<eos>", ""), "nobody answers"
    else:
        assert said == "1<eos>2<eos>" and told in heard
        assert output.extra_fields["turn_scores"] == [0.0 if method == "answer" else 0.5]


def test_what_the_files_of_a_run_say_wrongly_ends_it(run: Run) -> None:
    partner = Failing("start", DataError("no ground_truth"))
    with pytest.raises(DataError, match="no ground_truth"):
        run("1<eos>", interactions={"quiz": partner}, interaction_kwargs={"name": "quiz"})


def test_an_answer_that_no_parser_can_read_is_told_and_counted(
    run: Run, tokenizer: PreTrainedTokenizerFast
) -> None:
    said = '<tool_call>{"name": "add", "arguments": ' + "[" * 2000 + "</tool_call>"
    output, _ = run(
        f"{said}<eos>", "Sorry.<eos>",
        overrides=["data.max_response_length=3000", f"{MULTI_TURN}.max_tool_response_length=200"],
    )  # fmt: skip
    assert output.tool_calls == {"other/malformed": 1}
    assert "could not be read" in spoken(output, tokenizer)[1]


def test_a_row_may_choose_among_the_tools(run: Run, tokenizer: PreTrainedTokenizerFast) -> None:
    output, _ = run("1<eos>", extra_info={"tool_selection": []})
    assert tokenizer.decode(output.prompt_ids) == "<|u|>20+22?<eos><|a|>"


def test_one_turn(run: Run, tokenizer: PreTrainedTokenizerFast) -> None:
    output, _ = run("42<eos>")
    assert (output.num_turns, output.response_mask) == (2, [1, 1, 1])
