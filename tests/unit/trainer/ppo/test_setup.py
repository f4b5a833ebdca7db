"""What is checked before workers are started."""

from __future__ import annotations

import pytest

from caldera.config import PPOTrainerConfig
from caldera.errors import ConfigError
from caldera.trainer.ppo import setup


def test_a_missing_megatron_is_told_before_processes_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    config = PPOTrainerConfig()
    config.algorithm.adv_estimator = "grpo"
    config.critic.strategy = "megatron"
    setup.check_installed(config)  # there is no critic
    config.actor_rollout_ref.actor.strategy = "megatron"
    told = r"^actor_rollout_ref\.actor\.strategy='megatron' needs .*'\.\[megatron\]'$"
    with pytest.raises(ConfigError, match=told):
        setup.check_installed(config)
    monkeypatch.setattr(setup, "find_spec", lambda name: object())
    setup.check_installed(config)
