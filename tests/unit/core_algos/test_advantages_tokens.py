"""Estimators that tell tokens apart, and what they are made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from caldera.config.algorithm import AlgorithmConfig
from caldera.core_algos import (
    AdvantageInputs,
    compute_optimal_token_baseline_advantage,
    compute_remax_outcome_advantage,
    compute_tir_optimal_token_baseline_advantage,
    estimate_advantages,
    masked_whiten,
)
from caldera.core_algos.advantages.gae import reverse_scan
from caldera.core_algos.advantages.group_relative import Groups
from caldera.core_algos.advantages.tokens import KeptTokens, Moments, whiten_in_place

NAN = float("nan")


def assert_close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


class TestRemax:
    def test_by_hand(self) -> None:
        rewards = torch.tensor([[1.0, 0.0, 2.0, NAN], [0.0, NAN, NAN, NAN], [NAN] * 4])
        mask = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
        baselines = torch.tensor([0.5, 1.0, 7.0])
        advantages, returns = compute_remax_outcome_advantage(rewards, baselines, mask)
        assert returns.tolist() == [[3.0, 0.0, 2.0, 0.0], [0.0] * 4, [0.0] * 4]
        assert advantages.tolist() == [[2.5, 0.0, 1.5, 0.0], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4]


TOKEN_ESTIMATORS = (
    *("gae", "reinforce_plus_plus", "remax"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_a_reward_outside_the_mask_belongs_to_the_action_before_it(name: str) -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    elsewhere = torch.tensor([[5.0, 0, 1, 2, 4, 0, 3, NAN], [0, 0, 0, 0, NAN, 1, NAN, NAN]])
    on_actions = torch.tensor([[0.0, 0, 7, 0, 0, 3, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]])

    def run(rewards: Tensor) -> tuple[Tensor, Tensor]:
        inputs = AdvantageInputs(
            rewards, mask, index=["a", "a"],
            values=torch.linspace(-1, 1, 16).view(2, 8),
            reward_baselines=torch.tensor([0.5, 0.0]),
            old_log_probs=-torch.linspace(0.1, 2, 16).view(2, 8),
            sum_pi_squared=torch.linspace(0.2, 0.8, 16).view(2, 8),
        )  # fmt: skip
        return estimate_advantages(name, inputs, AlgorithmConfig(gamma=0.9, lam=0.8))

    torch.testing.assert_close(run(elsewhere), run(on_actions))
    assert run(on_actions)[1][0, 1] != 0


class TestOptimalTokenBaseline:
    def inputs(self, mask: list[list[int]], rewards: list[list[float]]) -> dict[str, Any]:
        """Every token adds 0.5 to the first trajectory's weight, and 1 to those of the others."""
        kept = torch.tensor(mask)
        probabilities = torch.full(kept.shape, 0.25)
        probabilities[0] = 0.5
        return {
            "token_level_rewards": torch.tensor(rewards, dtype=torch.float32),
            "response_mask": kept,
            "old_log_probs": probabilities.log().masked_fill(kept == 0, NAN),
            "sum_pi_squared": torch.full(kept.shape, 0.5).masked_fill(kept == 0, NAN),
        }

    def test_by_hand_with_a_tail(self) -> None:
        inputs = self.inputs([[1, 1, 1], [1, 1, 0]], [[0, 0, 1], [0, 2, NAN]])
        # W: 0.5, 1, 1.5 and 1, 2; baselines (1 * 0.5 + 2 * 1) / 1.5, (1 * 1 + 2 * 2) / 3, and 0
        # where the first trajectory is alone
        for estimator in (
            compute_optimal_token_baseline_advantage,
            compute_tir_optimal_token_baseline_advantage,
        ):
            advantages, returns = estimator(**inputs, index=["a", "a"])
            assert_close(returns, [[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]])
            assert_close(advantages, [[-2 / 3, -2 / 3, 1.0], [1 / 3, 1 / 3, 0.0]])

    def test_importance_weights_count_squared(self) -> None:
        inputs = self.inputs([[1, 1], [1, 1]], [[0, 1], [0, 2]])
        weights = torch.tensor([[2.0, 2.0], [1.0, 1.0]])
        # W: 0.5 * 4, 1 * 4 and 1, 2: baselines (2 + 2) / 3 and (4 + 4) / 6
        advantages, _ = compute_optimal_token_baseline_advantage(
            **inputs, index=["a", "a"], rollout_is_weights=weights
        )
        assert_close(advantages, [[-1 / 3, -1 / 3], [2 / 3, 2 / 3]])

    def test_positions_and_actions_differ_where_there_are_observations(self) -> None:
        inputs = self.inputs([[1, 0, 1], [1, 1, 0]], [[0, 0, 1], [0, 2, NAN]])
        # By position: the second trajectory is the only one at place 1; place 2 is a tail.
        advantages, returns = compute_optimal_token_baseline_advantage(**inputs, index=["a", "a"])
        assert_close(advantages, [[-2 / 3, 0.0, 1.0], [1 / 3, 0.0, 0.0]])
        assert_close(returns, [[1.0, 0.0, 1.0], [2.0, 2.0, 0.0]])
        # By action: both have two, with W 0.5, 1 and 1, 2.
        advantages, returns = compute_tir_optimal_token_baseline_advantage(
            **inputs, index=["a", "a"]
        )
        assert_close(advantages, [[-2 / 3, 0.0, -2 / 3], [1 / 3, 1 / 3, 0.0]])
        assert_close(returns, [[1.0, 0.0, 1.0], [2.0, 2.0, 0.0]])

    def test_of_two_longest_trajectories_neither_has_a_tail(self) -> None:
        inputs = self.inputs([[1, 1], [1, 1], [1, 0]], [[0, 1], [0, 1], [1, NAN]])
        advantages, _ = compute_optimal_token_baseline_advantage(**inputs, index=["a"] * 3)
        assert_close(advantages, [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])

    def test_a_group_of_one_has_no_baseline(self) -> None:
        inputs = self.inputs([[1, 1], [1, 0]], [[0, 1], [3, NAN]])
        advantages, _ = compute_optimal_token_baseline_advantage(**inputs, index=["a", "b"])
        assert_close(advantages, [[1.0, 1.0], [3.0, 0.0]])

    def test_a_policy_without_doubt_has_no_baseline(self) -> None:
        certain = torch.zeros(2, 1)  # log-probabilities: 1 - 2 * 1 + 1 = 0
        advantages, _ = compute_optimal_token_baseline_advantage(
            torch.ones(2, 1), torch.ones(2, 1), ["a", "a"], certain, torch.ones(2, 1)
        )
        assert advantages.tolist() == [[1.0], [1.0]]


class TestReverseScan:
    @settings(deadline=None, max_examples=25)
    @given(
        width=st.integers(1, 100),
        decay=st.sampled_from([0.0, 1e-3, 0.5, 0.9405, 0.999, 1.0]),
        seed=st.integers(0, 999),
    )
    def test_equals_a_loop(self, width: int, decay: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        addends = torch.randn(3, width, generator=generator, dtype=torch.float64)
        expected = torch.zeros_like(addends)
        following = torch.zeros(3, dtype=torch.float64)
        for t in reversed(range(width)):
            following = addends[:, t] + decay * following
            expected[:, t] = following
        torch.testing.assert_close(reverse_scan(addends, decay), expected)

    def test_long_rows_stay_exact(self) -> None:
        width, decay = 5000, 0.999  # three levels of chunks
        sums = reverse_scan(torch.ones(1, width, dtype=torch.float64), decay)
        assert sums[0, 0].item() == pytest.approx((1 - decay**width) / (1 - decay), rel=1e-12)

    def test_rows_without_tokens(self) -> None:
        assert reverse_scan(torch.zeros(2, 0), 0.5).shape == (2, 0)


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    bits = st.lists(st.integers(0, 1), min_size=rows * width, max_size=rows * width)
    return torch.tensor(draw(bits)).view(rows, width)


class TestKeptTokens:
    @settings(deadline=None, max_examples=25)
    @given(mask=masks())
    def test_packing_moves_and_loses_nothing(self, mask: Tensor) -> None:
        values = torch.arange(1.0, mask.numel() + 1).view(mask.shape)
        tokens = KeptTokens(mask)
        packed = tokens.pack(values.masked_fill(mask == 0, NAN))
        for row, kept, is_kept in zip(packed, values, mask.bool(), strict=True):
            count = int(is_kept.sum())
            assert row[:count].tolist() == kept[is_kept].tolist()
            assert not row[count:].any()
        assert torch.equal(tokens.packed_mask(), packed > 0)
        assert torch.equal(tokens.unpack(packed), values * mask)

    @settings(deadline=None, max_examples=25)
    @given(mask=masks())
    def test_rewards_are_lost_only_before_the_first_token(self, mask: Tensor) -> None:
        rewards = torch.arange(1.0, mask.numel() + 1).view(mask.shape)
        packed = KeptTokens(mask).pack_rewards(rewards)
        started = mask.cumsum(-1) > 0
        assert packed.sum(-1).tolist() == (rewards * started).sum(-1).tolist()
        assert not packed.masked_select(~KeptTokens(mask).packed_mask()).any()


@pytest.mark.parametrize("seed", range(3))
def test_whitening_is_that_of_masked_whiten(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 7, generator=generator) < 0.6
    mask[0] = False
    values = (3 + torch.randn(5, 7, generator=generator)) * mask
    expected = masked_whiten(values, mask) * mask
    whitened = whiten_in_place(values.clone(), mask, Moments.of(values, mask))
    torch.testing.assert_close(whitened, expected, rtol=1e-5, atol=1e-5)


def test_whitening_equal_values_leaves_no_noise() -> None:
    values, mask = torch.full((3, 1001), 0.1), torch.ones(3, 1001, dtype=torch.bool)
    whitened = whiten_in_place(values.clone(), mask, Moments.of(values, mask))
    assert whitened.abs().max() < 1e-3


@pytest.mark.parametrize("height", [1, 2, 3, 100])
def test_blocks_hold_whole_groups(height: int) -> None:
    uids = ["a", "b", "a", "c", "b", "a"]
    groups = Groups.from_uids(uids, torch.zeros(6))
    blocks = [rows.tolist() for rows in groups.blocks(height)]
    assert sorted(row for rows in blocks for row in rows) == list(range(6))
    together = [{uids[row] for row in rows} for rows in blocks]
    assert sum(len(block) for block in together) == 3
    assert len(blocks) == {1: 3, 2: 3, 3: 2, 100: 1}[height]


def test_the_two_largest_of_each_group() -> None:
    groups = Groups.from_uids(["a", "b", "a", "c", "a", "b"], torch.zeros(6))
    first, second = groups.first_two(torch.tensor([3.0, -1.0, 7.0, 4.0, 5.0, -math.inf]))
    assert first.tolist() == [2, 1, 3]
    assert second.tolist() == [4, 5, 3]
