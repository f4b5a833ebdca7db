"""Columns of the data that the reward cannot do without."""

from __future__ import annotations

from typing import Any

from caldera.config import PPOTrainerConfig
from caldera.data import RLHFDataset
from caldera.reward import RewardManager, is_built_in

__all__ = ["check_columns"]


def check_columns(
    config: PPOTrainerConfig,
    manager: RewardManager,
    train_set: Any,
    val_set: Any,
    agents_may_score: bool,
) -> None:
    """The files have the columns whose lack would be noticed with the first answers.

    A manager or a data set of the user's own may do without, and so may rows that an agent loop
    scores. A reward model of the run's own knows no columns, but validation does not ask it.
    """
    trainer, reward_model = config.trainer, config.reward_model
    reads_rows = is_built_in(manager) and not agents_may_score
    if reads_rows and not trainer.val_only and (reward_model.is_served or not reward_model.enable):
        _require_source(config, train_set)
        _require_truth(train_set)
    if trainer.val_only or trainer.val_before_train or trainer.test_freq > 0:
        _require_source(config, val_set)  # which names the metrics
        if reads_rows:
            _require_truth(val_set)


def _require_source(config: PPOTrainerConfig, dataset: Any) -> None:
    if type(dataset) is RLHFDataset:
        dataset.require_column(config.data.reward_fn_key, "named by data.reward_fn_key")


def _require_truth(dataset: Any) -> None:
    if type(dataset) is RLHFDataset:
        dataset.require_column("reward_model", "which holds the ground truth")
