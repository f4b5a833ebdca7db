from __future__ import annotations

import enum
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from caldera.config import estimators
from caldera.config.algorithm import AlgorithmConfig
from caldera.core_algos import (
    ADV_ESTIMATORS,
    AdvantageEstimator,
    AdvantageInputs,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    estimate_advantages,
    get_adv_estimator_fn,
    register_adv_est,
)
from caldera.errors import ConfigError, DataError, ProtocolError, RegistryError

NAN = float("nan")


def assert_close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


class TestGae:
    def test_by_hand_with_an_observation_amid_the_response(self) -> None:
        # the reward of the observation belongs to the action before it: -2 + 2 = 0
        rewards = torch.tensor([[-2.0, 2.0, 1.0], [0.5, NAN, NAN], [NAN, NAN, NAN]])
        values = torch.tensor([[1.0, 7.0, 2.0], [0.5, NAN, NAN], [NAN, NAN, NAN]])
        mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
        advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.5)
        # last token: 1 - 2 = -1; first: (0 + 0.5 * 2 - 1) + 0.25 * -1 = -0.25; second row: 0
        assert_close(returns, [[0.75, 0.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
        # mean -1.25 / 3, variance 0.2708333
        assert_close(
            advantages, [[0.3202563, 0.0, -1.1208971], [0.8006408, 0.0, 0.0], [0.0, 0.0, 0.0]]
        )

    def test_without_discount_the_return_is_the_sum_of_rewards(self) -> None:
        rewards = torch.tensor([[1.0, 2.0, 4.0]])
        values = torch.tensor([[0.3, -0.2, 0.9]])
        _, returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 3), 1.0, 1.0)
        assert_close(returns, [[7.0, 6.0, 4.0]])

    def test_lambda_zero_is_the_one_step_error(self) -> None:
        rewards = torch.tensor([[1.0, 2.0]])
        values = torch.tensor([[3.0, 5.0]])
        _, returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 2), 0.5, 0.0)
        assert_close(returns, [[1 + 0.5 * 5, 2.0]])

    @pytest.mark.parametrize("seed", range(5))
    def test_equals_a_loop(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rewards, values = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
        mask = (torch.rand(5, 9, generator=generator) < 0.6).long()
        mask[0] = 0
        advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
        expected_advantages, expected_returns = gae_by_loop(rewards, values, mask, 0.9, 0.8)
        torch.testing.assert_close(advantages, expected_advantages)
        torch.testing.assert_close(returns, expected_returns)

    def test_a_batch_of_one_token_cannot_be_whitened(self) -> None:
        with pytest.raises(DataError, match="at least 2"):
            compute_gae_advantage_return(
                torch.ones(1, 2), torch.ones(1, 2), torch.tensor([[1, 0]]), 1.0, 1.0
            )


def gae_by_loop(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Drop the tokens outside the mask, run the textbook recursion, put the rest back.

    Rewards outside the mask are kept for the token of the mask before them.
    """
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    seen: list[float] = []
    for i in range(len(rewards)):
        reward = next_value = next_advantage = 0.0
        for t in reversed(range(rewards.shape[1])):
            reward += rewards[i, t].item()
            if not mask[i, t]:
                continue
            delta = reward + gamma * next_value - values[i, t].item()
            next_advantage = delta + gamma * lam * next_advantage
            next_value, reward = values[i, t].item(), 0.0
            advantages[i, t] = next_advantage
            returns[i, t] = next_advantage + next_value
            seen.append(next_advantage)
    mean, variance = float(np.mean(seen)), float(np.var(seen, ddof=1))
    return (advantages - mean) / np.sqrt(variance + 1e-8) * mask, returns


class TestGrpo:
    # Scores by uid: a 1, 0; b 3, 3; c 5; d 0, 1, 5.
    UIDS = np.array(["a", "b", "a", "c", "d", "b", "d", "d"], dtype=object)
    SCORES = torch.tensor([1.0, 3.0, 0.0, 5.0, 0.0, 3.0, 1.0, 5.0])

    def inputs(self) -> tuple[Tensor, Tensor]:
        rewards = torch.zeros(8, 3)
        rewards[:, 1] = self.SCORES - 0.5
        rewards[:, 2] = 0.5
        mask = torch.tensor([[1, 0, 1]]).repeat(8, 1)
        mask[2] = 0
        return rewards, mask

    def test_by_hand(self) -> None:
        rewards, mask = self.inputs()
        advantages, returns = compute_grpo_outcome_advantage(rewards, mask, self.UIDS)
        a, c = 0.5 / (0.5**0.5 + 1e-6), 5 / (1 + 1e-6)
        d = [deviation / (7**0.5 + 1e-6) for deviation in (-2, -1, 3)]
        by_row = [a, 0.0, 0.0, c, d[0], 0.0, d[1], d[2]]  # the third row has no tokens
        assert_close(advantages, [[x, 0.0, x] for x in by_row])
        torch.testing.assert_close(returns, advantages)

    def test_without_the_standard_deviation(self) -> None:
        rewards, mask = self.inputs()
        advantages, _ = compute_grpo_outcome_advantage(
            rewards, mask, self.UIDS, norm_adv_by_std_in_grpo=False
        )
        assert_close(advantages[:, 0], [0.5, 0.0, 0.0, 5.0, -2.0, 0.0, -1.0, 3.0])

    def test_a_group_that_agrees_has_exactly_no_advantage(self) -> None:
        rewards = torch.full((7, 1), 0.1)
        advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(7, 1), ["a"] * 7)
        assert advantages.flatten().tolist() == [0.0] * 7

    @pytest.mark.parametrize(
        "uids",
        [
            [("x", 1), ("x", 2), ("x", 1)],
            [7, "seven", 7],
            np.array([3, 1, 3]),
            torch.tensor([3, 1, 3]),
        ],
        ids=["tuples", "mixed", "numpy integers", "tensor"],
    )
    def test_uids_of_any_hashable(self, uids: Any) -> None:
        rewards = torch.tensor([[1.0], [2.0], [3.0]])
        advantages, _ = compute_grpo_outcome_advantage(
            rewards, torch.ones(3, 1), uids, norm_adv_by_std_in_grpo=False
        )
        assert advantages.flatten().tolist() == [-1.0, 2.0, 1.0]

    def test_uids_must_fit_the_batch(self) -> None:
        with pytest.raises(ProtocolError, match="2 uids for a batch of 3"):
            compute_grpo_outcome_advantage(torch.ones(3, 1), torch.ones(3, 1), ["a", "b"])

    @pytest.mark.parametrize("normalise", [True, False])
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_a_loop(self, seed: int, normalise: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randn(12, 4, generator=generator)
        mask = torch.rand(12, 4, generator=generator) < 0.6
        uids = torch.randint(0, 5, (12,), generator=generator).tolist()
        actual, _ = compute_grpo_outcome_advantage(
            rewards, mask, uids, norm_adv_by_std_in_grpo=normalise
        )
        torch.testing.assert_close(actual, grpo_by_loop(rewards, mask, uids, normalise))


def grpo_by_loop(rewards: Tensor, mask: Tensor, uids: list[int], normalise: bool) -> Tensor:
    advantages = torch.zeros_like(rewards)
    scores = rewards.double().sum(-1).tolist()
    for i, uid in enumerate(uids):
        group = [score for score, other in zip(scores, uids, strict=True) if other == uid]
        mean, std = (np.mean(group), np.std(group, ddof=1)) if len(group) > 1 else (0.0, 1.0)
        advantage = (scores[i] - mean) / (std + 1e-6 if normalise else 1.0)
        for t in range(rewards.shape[1]):
            advantages[i, t] = advantage if mask[i, t] else 0.0
    return advantages


class TestReinforcePlusPlus:
    def test_by_hand_with_an_observation_amid_the_response(self) -> None:
        # the reward of the observation belongs to the action before it: -3 + 4 = 1
        rewards = torch.tensor([[-3.0, 4.0, 2.0], [0.0, 4.0, NAN], [NAN, NAN, NAN]])
        mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]])
        advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, AlgorithmConfig(gamma=0.5)
        )
        assert_close(returns, [[2.0, 0.0, 2.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
        # the returns have mean 2.5 and variance 1
        assert_close(advantages, [[-0.5, 0.0, -0.5], [-0.5, 1.5, 0.0], [0.0, 0.0, 0.0]])


class TestRegistry:
    REWARDS = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    MASK = torch.ones(2, 2)

    def test_the_enum_names_what_is_registered(self) -> None:
        assert set(AdvantageEstimator) <= set(ADV_ESTIMATORS)
        assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is get_adv_estimator_fn("grpo")

    @pytest.mark.parametrize("name", AdvantageEstimator)
    def test_every_estimator_is_called_alike(self, name: AdvantageEstimator) -> None:
        arguments: dict[str, Any] = {
            "token_level_rewards": self.REWARDS.clone().requires_grad_(),
            "response_mask": self.MASK,
            "index": np.array(["a", "a"], dtype=object),
            "values": torch.zeros(2, 2),
            "reward_baselines": torch.zeros(2),
            "sum_pi_squared": torch.full((2, 2), 0.5),
            "old_log_probs": torch.full((2, 2), 0.5).log(),
            "rollout_is_weights": torch.ones(2, 2),
            "non_tensor_batch": {"acc": np.array([1.0, 0.0], dtype=object)},
            "batch": {"responses": torch.zeros(2, 2)},
        }
        config = AlgorithmConfig(gdpo_reward_keys=["acc"])
        advantages, returns = estimate_advantages(name, AdvantageInputs(**arguments), config)
        assert advantages.shape == returns.shape == (2, 2)
        assert not advantages.requires_grad
        assert not returns.requires_grad
        assert advantages[0, 0] > advantages[1, 0]
        directly, _ = get_adv_estimator_fn(name)(config=config, **arguments)
        torch.testing.assert_close(directly, advantages)

    def test_the_configuration_reaches_the_estimators(self) -> None:
        inputs = AdvantageInputs(self.REWARDS, self.MASK, ["a", "a"], torch.zeros(2, 2))
        config = AlgorithmConfig(gamma=0.5, lam=0.5, norm_adv_by_std_in_grpo=False)
        _, gae_returns = estimate_advantages("gae", inputs, config)
        assert_close(gae_returns, [[0.25, 1.0], [0.0, 0.0]])
        dr_grpo, _ = estimate_advantages("grpo", inputs, config)
        assert_close(dr_grpo, [[0.5, 0.5], [-0.5, -0.5]])
        _, returns = estimate_advantages("reinforce_plus_plus", inputs, config)
        assert_close(returns, [[0.5, 1.0], [0.0, 0.0]])

    def test_gae_asks_for_a_critic(self) -> None:
        with pytest.raises(ConfigError, match="'gae' needs the values of a critic"):
            estimate_advantages("gae", AdvantageInputs(self.REWARDS, self.MASK), AlgorithmConfig())

    def test_grpo_asks_for_uids(self) -> None:
        with pytest.raises(ProtocolError, match="'grpo' needs index"):
            estimate_advantages("grpo", AdvantageInputs(self.REWARDS, self.MASK), AlgorithmConfig())

    @pytest.mark.parametrize(
        ("name", "needed"),
        [
            ("remax", "needs reward_baselines"),
            ("optimal_token_baseline", r"actor_rollout_ref\.actor\.calculate_sum_pi_squared=True"),
            ("tir_optimal_token_baseline", "calculate_sum_pi_squared=True"),
        ],
    )
    def test_missing_inputs_name_what_brings_them(self, name: str, needed: str) -> None:
        inputs = AdvantageInputs(self.REWARDS, self.MASK, ["a", "a"], old_log_probs=self.REWARDS)
        with pytest.raises(ConfigError, match=f"algorithm.adv_estimator='{name}' .*{needed}"):
            estimate_advantages(name, inputs, AlgorithmConfig())

    def test_a_custom_estimator_that_asks_for_what_there_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ADV_ESTIMATORS, "_items", dict(ADV_ESTIMATORS._items))

        @register_adv_est("novel")
        def novel(token_level_rewards: Tensor, moon_phase: Tensor) -> tuple[Tensor, Tensor]:
            return token_level_rewards, moon_phase

        with pytest.raises(ProtocolError, match="'novel' needs moon_phase, which the batch does"):
            estimate_advantages(
                "novel", AdvantageInputs(self.REWARDS, self.MASK), AlgorithmConfig()
            )

    def test_a_custom_estimator_takes_any_tensor_of_the_batch_by_name(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ADV_ESTIMATORS, "_items", dict(ADV_ESTIMATORS._items))

        @register_adv_est("novel")
        def novel(token_level_rewards: Tensor, moon_phase: Tensor) -> tuple[Tensor, Tensor]:
            return token_level_rewards, moon_phase

        batch = {"moon_phase": torch.ones(2, 2), "token_level_rewards": torch.full((2, 2), 9.0)}
        inputs = AdvantageInputs(self.REWARDS, self.MASK, batch=batch)
        advantages, returns = estimate_advantages("novel", inputs, AlgorithmConfig())
        assert advantages is self.REWARDS
        assert returns is batch["moon_phase"]

    def test_a_custom_estimator_takes_what_it_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ADV_ESTIMATORS, "_items", dict(ADV_ESTIMATORS._items))

        class Mine(str, enum.Enum):  # noqa: UP042 - the kind of enum that people have
            PLAIN = "plain"

        @register_adv_est(Mine.PLAIN)
        def plain(
            token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None
        ) -> tuple[Tensor, Tensor]:
            assert list(index) == ["a", "b"]
            return token_level_rewards * config.gamma, response_mask

        @register_adv_est("greedy_copy")
        def greedy_copy(
            token_level_rewards: Tensor, response_mask: Tensor, config: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            assert sorted(kwargs) == ["index", "reward_baselines"]  # there are no values
            return token_level_rewards - kwargs["reward_baselines"][:, None], response_mask

        inputs = AdvantageInputs(
            self.REWARDS, self.MASK, index=["a", "b"], reward_baselines=torch.tensor([1.0, 2.0])
        )
        advantages, _ = estimate_advantages("plain", inputs, AlgorithmConfig(gamma=0.5))
        assert advantages.tolist() == [[0.0, 0.5], [0.0, 0.0]]
        advantages, _ = estimate_advantages("greedy_copy", inputs, AlgorithmConfig())
        assert advantages.tolist() == [[-1.0, 0.0], [-2.0, -2.0]]

    def test_registration_declares_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ADV_ESTIMATORS, "_items", dict(ADV_ESTIMATORS._items))
        monkeypatch.setattr(estimators, "ESTIMATOR_NEEDS", dict(estimators.ESTIMATOR_NEEDS))

        def lone(token_level_rewards: Tensor) -> tuple[Tensor, Tensor]:
            return token_level_rewards, token_level_rewards

        register_adv_est("in_groups", needs={"groups"})(lone)
        assert estimators.needs_of("in_groups") == {"groups"}
        with pytest.raises(ConfigError, match=r"rollout.n=1: .*='in_groups' compares"):
            estimators.check_group_size("in_groups", 1)
        with pytest.raises(ConfigError, match="needs 'group': takes some of critic, greedy_base"):
            register_adv_est("misspelled", needs={"group"})(lone)

    def test_needs_stand_for_every_built_in_estimator(self) -> None:
        assert set(estimators.AdvantageEstimator) <= estimators.ESTIMATOR_NEEDS.keys()
        for name in estimators.AdvantageEstimator:
            taken = inspect.signature(ADV_ESTIMATORS[name]).parameters
            needs = estimators.needs_of(name)
            assert ("critic" in needs) == ("values" in taken)
            assert ("greedy_baseline" in needs) == ("reward_baselines" in taken)
            assert ("sum_pi_squared" in needs) == ("sum_pi_squared" in taken)

    def test_unknown_and_taken_names(self) -> None:
        with pytest.raises(RegistryError, match=r"'grop'; did you mean 'grpo'\? \(known: gae, "):
            get_adv_estimator_fn("grop")
        with pytest.raises(RegistryError, match="'gae' is registered already"):
            register_adv_est("gae")(compute_reinforce_plus_plus_outcome_advantage)
