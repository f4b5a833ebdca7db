from __future__ import annotations

from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig, load_config

REQUIRED = {
    "data.train_files": "train.parquet",
    "data.val_files": "val.parquet",
    "actor_rollout_ref.model.path": "M",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
    "critic.ppo_micro_batch_size_per_gpu": "4",
}


@pytest.fixture
def required() -> list[str]:
    """Overrides without which nothing loads."""
    return [f"{key}={value}" for key, value in REQUIRED.items()]


@pytest.fixture
def load() -> Callable[..., PPOTrainerConfig]:
    """Load with overrides on top of the required keys, some of which may be left out."""

    def make(*overrides: str, without: str | None = None) -> PPOTrainerConfig:
        required = [f"{key}={value}" for key, value in REQUIRED.items() if key != without]
        return load_config([*required, *overrides])

    return make
