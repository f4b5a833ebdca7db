"""Trajectories of a real model, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from caldera.agent_loop.base import AGENT_LOOPS, AgentLoopBase, AgentLoopOutput
from caldera.agent_loop.manager import AgentLoops
from caldera.agent_loop.output import COLUMN
from caldera.errors import ConfigError, RegistryError, RolloutError
from caldera.protocol import DataProto, tensors_of
from caldera.rollout import Completion, NativeRollout, Request, SamplingParams
from tests.unit.agent_loop.agent_scripts import equipment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from caldera.config import PPOTrainerConfig

TURNS, TOKENS = 3, 6
KEY = "actor_rollout_ref.rollout.agent"
EXACT = "actor_rollout_ref.rollout.native.exact=True"
LENGTHS = ("data.max_prompt_length=12", "data.max_response_length=40")
STOPS = frozenset({2})
Loop = Callable[..., AgentLoops]


class Chatter(AgentLoopBase):
    """Asks for a few tokens, appends some of its own, and asks again."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = await self.apply_chat_template(row["raw_prompt"])
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        for _ in range(TURNS):
            asked = {**sampling_params, "max_tokens": TOKENS, "ignore_eos": True}
            answer = await self.server_manager.generate("name", prompt + ids, asked)
            told = self.equipment.turns.continuation(
                [{"role": "user", "content": "."}], answer.token_ids[-1]
            )
            ids += answer.token_ids + told
            mask += [1] * TOKENS + [0] * len(told)
            log_probs += answer.log_probs + [0.0] * len(told)
        return AgentLoopOutput(
            prompt, ids, mask, log_probs, num_turns=2 * TURNS,
            reward_score=row.get("given"), extra_fields={"turn_scores": [0.5]},
        )  # fmt: skip


class Forgetful(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Returns nothing."""


class Broken(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise ValueError("of its own")


@pytest.fixture(autouse=True)
def loops_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AGENT_LOOPS, "_items", dict(AGENT_LOOPS._items))
    AGENT_LOOPS.register("chatter")(Chatter)
    AGENT_LOOPS.register("broken")(Broken)
    AGENT_LOOPS.register("forgetful")(Forgetful)


@pytest.fixture
def make(
    load: Callable[..., PPOTrainerConfig], tokenizer: PreTrainedTokenizerFast,
    tiny_model: Callable[..., PreTrainedModel],
) -> Callable[..., tuple[AgentLoops, NativeRollout]]:  # fmt: skip
    def build(*overrides: str) -> tuple[AgentLoops, NativeRollout]:
        config = load(*LENGTHS, *overrides)
        model = tiny_model(vocab_size=len(tokenizer))
        rollout = NativeRollout(config.actor_rollout_ref.rollout, model, torch.device("cpu"))
        return AgentLoops(config, tokenizer, lambda _, t: equipment(t)), rollout

    return build


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"raw_prompt": [{"role": "user", "content": "ab"[: 1 + n % 2]}], "uid": f"{n}", **fields}
        for n in range(count)
    ]


def sample(
    made: tuple[AgentLoops, NativeRollout], given: Sequence[dict[str, Any]],
    told: Callable[[int, Completion], None] | None = None,
) -> DataProto:  # fmt: skip
    loops, rollout = made
    params = SamplingParams(max_tokens=40, stop_token_ids=STOPS)
    return loops(given, list(range(len(given))), rollout, params, 0, told)


def test_samples_do_not_depend_on_how_many_run_at_a_time(make: Any) -> None:
    """To the bit, with the sampler that is exact: seeds follow from rows and turns alone."""
    asked = rows(64, agent_name="chatter")
    batches = [
        tensors_of(sample(make(EXACT, f"{KEY}.max_concurrent={most}"), asked)) for most in (1, 64)
    ]
    for key in ("responses", "rollout_log_probs", "response_mask", "prompts"):
        assert torch.equal(batches[0][key], batches[1][key]), key
    sampled = batches[0]["responses"][:, :TOKENS]
    assert len({tuple(row.tolist()) for row in sampled}) > 32, "rows have seeds of their own"
    later = batches[0]["responses"][:, TOKENS + 4 : 2 * TOKENS + 4]
    assert not torch.equal(sampled, later), "and so have turns"


def test_one_turn_samples_what_is_sampled_without_a_loop(
    make: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    loops, rollout = make(EXACT)
    batch = tensors_of(sample((loops, rollout), rows(4, agent_name="single_turn_agent")))
    for row in range(4):
        text = "<|u|>" + "ab"[: 1 + row % 2] + "<eos><|a|>"
        prompt = tokenizer.encode(text, add_special_tokens=False)
        request = Request(prompt, SamplingParams(max_tokens=40, stop_token_ids=STOPS), row)
        plain = rollout.generate([request])[0]
        length = len(plain.token_ids)
        assert batch["responses"][row, :length].tolist() == plain.token_ids
        assert batch["response_mask"][row].sum() == length
        assert batch["rollout_log_probs"][row, :length].tolist() == pytest.approx(plain.log_probs)
        assert batch["prompts"][row, -len(prompt) :].tolist() == prompt


def test_each_is_told_of_as_it_ends_unless_it_has_a_reward(make: Any) -> None:
    told: dict[int, Completion] = {}
    given = rows(3, agent_name="chatter")
    given[1]["given"] = 0.75
    batch = sample(make(), given, told.__setitem__)
    assert sorted(told) == [0, 2]
    assert told[0].columns == {"turn_scores": [0.5], "__num_turns__": 2 * TURNS}
    facts = batch.non_tensor_batch[COLUMN]
    assert [fact.reward_score for fact in facts] == [None, 0.75, None]
    mask = tensors_of(batch)["response_mask"][0]
    length = len(told[0].token_ids)
    assert int(mask.sum()) == TURNS * TOKENS and mask[length - 1] == 1
    assert [event["kind"] for event in facts[0].timeline] == ["generate"] * TURNS
    assert facts[0].metrics["generate_sequences"] > 0


def test_rows_choose_their_loops(make: Any) -> None:
    given = rows(2)
    given[0]["agent_name"] = "chatter"
    given[1]["agent_name"] = None  # the default, which is tool_agent
    facts = sample(make(), given).non_tensor_batch[COLUMN]
    assert facts[0].num_turns == 2 * TURNS
    assert "tool_rewards" in facts[1].extra_fields


def test_an_error_of_a_loop_ends_the_batch_and_says_where(make: Any) -> None:
    loops, rollout = make()
    given = rows(4, agent_name="chatter")
    given[2]["agent_name"] = "broken"
    with pytest.raises(ValueError, match="of its own") as caught:
        sample((loops, rollout), given)
    assert caught.value.__notes__ == ["in the agent loop 'broken', at uid 2"]
    assert not rollout.has_work(), "the others were given up"
    assert len(sample((loops, rollout), rows(2, agent_name="chatter"))) == 2


def test_a_loop_that_returns_something_else_is_named(make: Any) -> None:
    with pytest.raises(
        RolloutError, match=r"Forgetful\.run must return .*got a NoneType"
    ) as caught:
        sample(make(), rows(1, agent_name="forgetful"))
    assert caught.value.__notes__ == ["in the agent loop 'forgetful', at uid 0"]


def test_mistakes_of_rows(make: Any) -> None:
    with pytest.raises(RegistryError, match="'toll_agent'; did you mean 'tool_agent'"):
        sample(make(), rows(1, agent_name="toll_agent"))
    with pytest.raises(ConfigError, match="return_raw_chat"):
        sample(make(), [{"uid": "0", "raw_prompt": None}])


def test_turns_are_stamped_as_integers(make: Any) -> None:
    from caldera.trainer.ppo.agents import with_agent_columns

    batch = with_agent_columns(sample(make(), rows(2, agent_name="chatter")))
    assert batch.non_tensor_batch["__num_turns__"].dtype == np.int32
