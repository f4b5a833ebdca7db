from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from caldera.config.algorithm import AlgorithmConfig
from caldera.core_algos import (
    AdvantageInputs,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
    estimate_advantages,
)
from caldera.errors import ConfigError, DataError, ProtocolError, RewardError

NAN = float("nan")

# Scores by uid: a 1, 0; b 3, 3; c 5; d 0, 1, 5. Lengths: 1, 2, 3, 1, 1, 1, 2, 1.
UIDS = np.array(["a", "b", "a", "c", "d", "b", "d", "d"], dtype=object)
SCORES = torch.tensor([1.0, 3.0, 0.0, 5.0, 0.0, 3.0, 1.0, 5.0])
LENGTHS = torch.tensor([1, 2, 3, 1, 1, 1, 2, 1])
MASK = (torch.arange(4) < LENGTHS.unsqueeze(-1)).long()


def rewards_of(scores: Tensor) -> Tensor:
    """The score on the last token, NaN in the padding."""
    rewards = torch.zeros(MASK.shape).masked_fill(MASK == 0, NAN)
    rewards[torch.arange(len(LENGTHS)), LENGTHS - 1] = scores
    return rewards


def check(estimator: Any, by_row: list[float], **arguments: Any) -> None:
    advantages, returns = estimator(rewards_of(SCORES), MASK, UIDS, **arguments)
    expected = torch.tensor(by_row).unsqueeze(-1) * MASK
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, advantages)


def test_grpo_has_two_names_for_one_thing() -> None:
    assert compute_grpo_vectorized_outcome_advantage is compute_grpo_outcome_advantage


def test_grpo_normalises_unless_argument_or_config_says_no() -> None:
    plain = [0.5, 0.0, -0.5, 5.0, -2.0, 0.0, -1.0, 3.0]
    no = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    check(compute_grpo_outcome_advantage, plain, config=no)
    check(compute_grpo_outcome_advantage, plain, norm_adv_by_std_in_grpo=False)
    check(
        compute_grpo_outcome_advantage,
        plain,
        norm_adv_by_std_in_grpo=False,
        config=AlgorithmConfig(),
    )


def test_rloo() -> None:
    # d: 0 - (1 + 5) / 2, 1 - (0 + 5) / 2, 5 - (0 + 1) / 2
    check(compute_rloo_outcome_advantage, [1.0, 0.0, -1.0, 5.0, -3.0, 0.0, -1.5, 4.5])


def test_rloo_vectorized_gives_a_group_of_one_nothing() -> None:
    check(compute_rloo_vectorized_outcome_advantage, [1.0, 0.0, -1.0, 0.0, -3.0, 0.0, -1.5, 4.5])


def test_opo_weighs_by_length() -> None:
    # a: (1 * 1 + 3 * 0) / 4; d: (1 * 0 + 2 * 1 + 1 * 5) / 4
    a, d = 0.25, 1.75
    check(compute_opo_outcome_advantage, [1 - a, 0.0, -a, 5.0, -d, 0.0, 1 - d, 5 - d])


def test_opo_of_a_group_without_tokens() -> None:
    mask = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 1]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    advantages, _ = compute_opo_outcome_advantage(rewards, mask, ["a", "a", "b", "b"])
    expected = [[0, 0], [0, 0], [1 - 5 / 3, 0], [2 - 5 / 3, 2 - 5 / 3]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_gpg_scales_by_the_share_of_nonzero_scores() -> None:
    centred = [0.5, 0.0, -0.5, 5.0, -2.0, 0.0, -1.0, 3.0]
    check(compute_gpg_outcome_advantage, [8 / 6 * x for x in centred])
    check(compute_gpg_outcome_advantage, [2 / 6 * x for x in centred], f_norm=4.0)


def test_gpg_of_a_batch_that_failed() -> None:
    advantages, _ = compute_gpg_outcome_advantage(torch.zeros(2, 1), torch.ones(2, 1), ["a", "a"])
    assert advantages.tolist() == [[0.0], [0.0]]


def test_maxrl_divides_by_the_mean() -> None:
    # means: a 0.5, b 3, c 5, d 2
    check(compute_maxrl_outcome_advantage, [1.0, 0.0, -1.0, 0.0, -1.0, 0.0, -0.5, 1.5])


@pytest.mark.parametrize("scores", [[0.0, 0.0], [-1.0, 0.5], [-1.0, 1.0]])
def test_maxrl_without_success_is_zero(scores: list[float]) -> None:
    rewards = torch.tensor(scores).unsqueeze(-1)
    advantages, _ = compute_maxrl_outcome_advantage(rewards, torch.ones(2, 1), ["a", "a"])
    assert advantages.flatten().tolist() == [0.0, 0.0]


class TestGrpoPassk:
    UIDS = ("a", "b", "a", "b", "b", "c", "c")
    REWARDS = torch.tensor([[2.0], [0.0], [-1.0], [1.0], [5.0], [4.0], [4.0]])

    def test_the_best_gets_its_lead(self) -> None:
        advantages, returns = compute_grpo_passk_outcome_advantage(
            self.REWARDS, torch.ones(7, 1), self.UIDS, norm_adv_by_std_in_grpo=False
        )
        assert advantages.flatten().tolist() == [3.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0]
        assert torch.equal(returns, advantages)

    def test_over_the_standard_deviation(self) -> None:
        advantages, _ = compute_grpo_passk_outcome_advantage(
            self.REWARDS, torch.ones(7, 1), self.UIDS, config=AlgorithmConfig()
        )
        a, b = 3 / (4.5**0.5 + 1e-6), 4 / (7**0.5 + 1e-6)
        expected = torch.tensor([a, 0.0, 0.0, 0.0, b, 0.0, 0.0])
        torch.testing.assert_close(advantages.flatten(), expected)

    def test_one_answer_has_no_second_best(self) -> None:
        with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.n to 2 or more"):
            compute_grpo_passk_outcome_advantage(
                torch.ones(3, 1), torch.ones(3, 1), ["a", "a", "b"]
            )


class TestReinforcePlusPlusBaseline:
    def test_by_hand(self) -> None:
        rewards = torch.tensor([[1.0, NAN], [0.0, 0.0], [2.0, 0.0]])
        mask = torch.tensor([[1, 0], [1, 1], [1, 0]])
        advantages, returns = compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, ["a", "a", "c"]
        )
        # 0.5, twice -0.5 and 2 (a group of one keeps its score): mean 0.375, variance 1.395833
        expected = torch.tensor([[0.105802, 0.0], [-0.740613, -0.740613], [1.375424, 0.0]])
        torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(returns, advantages)

    def test_one_token_cannot_be_whitened(self) -> None:
        with pytest.raises(DataError, match="at least 2 unmasked tokens, the mask keeps 1"):
            compute_reinforce_plus_plus_baseline_outcome_advantage(
                torch.ones(2, 1), torch.tensor([[1], [0]]), ["a", "a"]
            )


class TestGdpo:
    MASK = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]])
    UIDS = ("a", "a", "b", "b")
    COLUMNS = {  # noqa: RUF012
        "acc": np.array([1.0, 0.0, 1.0, 1.0], dtype=object),
        "format": np.array([True, False, 0, np.float32(2)], dtype=object),
    }

    def run(self, **config: Any) -> Tensor:
        advantages, returns = compute_gdpo_outcome_advantage(
            torch.full((4, 2), NAN), self.MASK, self.UIDS, self.COLUMNS, AlgorithmConfig(**config)
        )
        assert torch.equal(returns, advantages)
        return advantages

    def test_by_hand(self) -> None:
        # acc: 0.5, -0.5, 0, 0; format: 0.5, -0.5, -1, 1; weighted by 1 and 2: 1.5, -1.5, -2, 2
        # on 2, 1, 1 and 2 tokens: mean 3.5 / 6, variance 16.708333 / 5
        advantages = self.run(
            gdpo_reward_keys=["acc", "format"],
            gdpo_reward_weights=[1.0, 2.0],
            norm_adv_by_std_in_grpo=False,
        )
        one, two, three, four = ((x - 3.5 / 6) / (16.708333 / 5) ** 0.5 for x in (1.5, -1.5, -2, 2))
        expected = torch.tensor([[one, one], [two, 0.0], [0.0, three], [four, four]])
        torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)

    def test_normalising_makes_scales_alike(self) -> None:
        advantages = self.run(gdpo_reward_keys=["acc", "format"])
        # a: both normalise to 0.7071; b: only format differs, and normalises to 0.7071
        difference_a = (advantages[0, 0] - advantages[1, 0]).item()
        difference_b = (advantages[3, 0] - advantages[2, 1]).item()
        assert difference_a == pytest.approx(2 * difference_b, rel=1e-4)

    def test_no_keys(self) -> None:
        with pytest.raises(ConfigError, match=r"'gdpo' needs algorithm\.gdpo_reward_keys"):
            self.run()

    def test_a_key_that_the_scorer_does_not_return(self) -> None:
        with pytest.raises(ConfigError, match=r"'length', which .* \(the batch holds: acc, format"):
            self.run(gdpo_reward_keys=["acc", "length"])

    def test_as_many_weights_as_keys(self) -> None:
        with pytest.raises(ConfigError, match="weights holds 1 numbers for the 2 keys"):
            self.run(gdpo_reward_keys=["acc", "format"], gdpo_reward_weights=[1.0])

    def test_values_must_be_numbers(self) -> None:
        columns = {"acc": np.array([1.0, None, 1.0, 1.0], dtype=object)}
        with pytest.raises(RewardError, match="'acc', which is None and no number for sample 1"):
            compute_gdpo_outcome_advantage(
                torch.zeros(4, 2), self.MASK, self.UIDS, columns,
                AlgorithmConfig(gdpo_reward_keys=["acc"]),
            )  # fmt: skip

    def test_a_batch_without_the_scorers_values(self) -> None:
        inputs = AdvantageInputs(torch.zeros(4, 2), self.MASK, self.UIDS)
        with pytest.raises(ProtocolError, match="'gdpo' needs non_tensor_batch"):
            estimate_advantages("gdpo", inputs, AlgorithmConfig(gdpo_reward_keys=["acc"]))


def test_options_may_be_given_by_place_as_verls_are() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    by_place, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"], 1e-6, False)
    assert by_place.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
