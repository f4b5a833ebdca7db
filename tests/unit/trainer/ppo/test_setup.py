"""What is checked before workers are started."""

from __future__ import annotations

import pytest

from caldera.config import PPOTrainerConfig
from caldera.core_algos import AdvantageEstimator
from caldera.errors import ConfigError
from caldera.trainer.ppo import setup
from caldera.trainer.ppo.advantage import check_algorithm


def test_a_missing_megatron_is_told_before_processes_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = PPOTrainerConfig()
    config.algorithm.adv_estimator = "grpo"
    config.critic.strategy = "megatron"
    setup.check_installed(config)  # there is no critic
    config.actor_rollout_ref.actor.strategy = "megatron"
    told = r"^actor_rollout_ref\.actor\.strategy='megatron' needs .*'\.\[megatron\]'$"
    with pytest.raises(ConfigError, match=told):
        setup.check_installed(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    setup.check_installed(config)


GROUP_RELATIVE = (
    "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "maxrl", "opo",
    "optimal_token_baseline", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized",
    "tir_optimal_token_baseline",
)  # fmt: skip


@pytest.mark.parametrize("estimator", [str(name.value) for name in AdvantageEstimator])
def test_one_response_a_prompt_is_refused_where_responses_are_compared(estimator: str) -> None:
    config = PPOTrainerConfig()
    config.algorithm.adv_estimator = estimator
    config.actor_rollout_ref.rollout.n = 2
    check_algorithm(config)
    config.actor_rollout_ref.rollout.n = 1
    if estimator not in GROUP_RELATIVE:
        check_algorithm(config)
        return
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.n=1: .*rollout\.n=8"):
        check_algorithm(config)
    config.trainer.val_only = True  # no advantage is computed
    check_algorithm(config)
