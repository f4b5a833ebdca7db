"""What the controller makes of trajectories: columns, metrics, and rewards of turns."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from caldera.agent_loop.output import COLUMN, TrajectoryFacts
from caldera.config import AlgorithmConfig, PPOTrainerConfig
from caldera.data import object_array
from caldera.protocol import DataProto, tensors_of
from caldera.reward import FAILED, OUTCOMES, RewardManager
from caldera.trainer.ppo.advantage import compute_advantage
from caldera.trainer.ppo.agents import agent_metrics, with_agent_columns
from caldera.trainer.ppo.rewards import record_scores, score_responses

MASK = [[1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1]]
LENGTHS = (4, 6)


def batch(*facts: TrajectoryFacts) -> DataProto:
    """Two trajectories after prompts of two tokens."""
    there = torch.tensor([[1] * length + [0] * (6 - length) for length in LENGTHS])
    tensors = {
        "prompts": torch.ones(2, 2, dtype=torch.long),
        "responses": torch.ones(2, 6, dtype=torch.long),
        "response_mask": torch.tensor(MASK),
        "attention_mask": torch.cat([torch.ones(2, 2, dtype=torch.long), there], dim=1),
    }
    columns = {COLUMN: object_array(list(facts))} if facts else {}
    return DataProto.from_dict(tensors, {**columns, "uid": object_array(["a", "b"])})


def facts(**changes: Any) -> TrajectoryFacts:
    metrics = {"generate_sequences": 1.0, "tool_calls": 0.0, "compute_score": 0.0}
    metrics |= changes.pop("seconds", {})
    return TrajectoryFacts(3, {**metrics, "num_preempted": -1}, **changes)


def scorer(data: DataProto, return_dict: bool = False) -> Any:
    """1 on the last token of each row; what it was given to know is kept."""
    rewards = torch.zeros(2, 6)
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] = 1.0
    return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1.0, 1.0]}}


def config(how: str = "trajectory") -> PPOTrainerConfig:
    made = PPOTrainerConfig()
    made.actor_rollout_ref.rollout.multi_turn.turn_rewards = how
    return made


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("trajectory", [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]]),
        ("turn", [[0, 0.5, 0, -0.25, 0, 0], [0, 0, 0, 0, 0, 0]]),
        ("mixed", [[0, 0.5, 0, 0.75, 0, 0], [0, 0, 0, 0, 0, 1]]),
    ],
)
def test_rewards_of_turns_and_of_trajectories(how: str, expected: list[list[float]]) -> None:
    data = batch(facts(turn_rewards=[(1, 0.5), (3, -0.25)]), facts())
    scores, _ = score_responses(data, scorer, config(how))
    assert scores.tolist() == expected


def test_rewards_of_turns_reach_the_advantages_of_their_tokens() -> None:
    """With a discount, the turn that earned a reward is better off than those before it."""
    data = batch(facts(turn_rewards=[(1, 1.0)]), facts(turn_rewards=[(5, 1.0)]))
    scores, _ = score_responses(data, scorer, config("turn"))
    tensors = tensors_of(data)
    tensors["token_level_rewards"] = scores
    tensors["values"] = torch.zeros(2, 6)
    compute_advantage(data, AlgorithmConfig(adv_estimator="gae", gamma=0.5, lam=1.0))
    returns = tensors_of(data)["returns"]
    assert returns[0, :2].tolist() == [0.5, 1.0], "the turn, and the token before"
    assert returns[0, 3] == 0.0, "what came after the reward has no part in it"
    # Tokens of the second one that are not the policy's take no time.
    assert returns[1][torch.tensor(MASK[1]).bool()].tolist() == [0.125, 0.25, 0.5, 1.0]


def test_a_reward_that_the_loop_gave_is_kept() -> None:
    data = batch(facts(reward_score=0.25), facts())
    seen: list[Any] = []

    def manager(given: DataProto, return_dict: bool = False) -> Any:
        seen.extend(given.non_tensor_batch[OUTCOMES])
        result = scorer(given)
        result["reward_extra_info"] |= {
            "reward_state": [FAILED, "value"], "reward_error": ["no", None]
        }  # fmt: skip
        return result

    scores, extras = score_responses(data, cast(RewardManager, manager), config())
    assert seen[0].score == 0.25 and seen[1] is None, "a manager of samples need not score it"
    assert scores.sum(-1).tolist() == [0.25, 1.0]
    assert extras["reward_state"] == ["value", "value"]


def test_columns_are_those_of_all_loops() -> None:
    data = with_agent_columns(batch(facts(extra_fields={"turn_scores": [0.5]}), facts()))
    columns = data.non_tensor_batch
    assert list(columns["turn_scores"]) == [[0.5], None]
    assert columns["__num_turns__"].tolist() == [3, 3]
    assert columns["__num_turns__"].dtype == np.int32
    assert list(with_agent_columns(batch()).non_tensor_batch) == ["uid"]


def test_what_agents_did_is_dumped_beside_the_answers() -> None:
    data = with_agent_columns(batch(facts(timeline=[{"kind": "generate"}]), facts()))
    scores, extras = score_responses(data, scorer, config())
    kept = record_scores(data, scores, extras, config())
    assert kept == ["acc", "__num_turns__", "tool_calls", "timeline"]


def test_metrics() -> None:
    metrics = agent_metrics(
        batch(
            facts(tool_calls={"add/ok": 2, "add/error": 1}),
            facts(tool_calls={"add/ok": 1}, seconds={"tool_calls": 2.0}),
        )
    )
    assert metrics["tool_calls/add/ok"] == 3
    assert metrics["tool_calls/add/error"] == 1
    assert metrics["tool_call_counts/mean"] == 2
    assert metrics["timing_s/agent_loop/generate_sequences/max"] == 1.0
    assert metrics["timing_s/agent_loop/slowest/tool_calls"] == 2.0
    assert metrics["timing_s/agent_loop/slowest/response_length"] == 6
    assert not any("num_preempted" in name for name in metrics), "nobody counts them"
    assert agent_metrics(batch()) == {}
