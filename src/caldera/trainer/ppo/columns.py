"""What the data must hold for rewards, checked before a model is loaded."""

from __future__ import annotations

from typing import Any

from caldera.config import PPOTrainerConfig
from caldera.data import RLHFDataset
from caldera.errors import ConfigError, DataError
from caldera.reward import NaiveRewardManager, RewardManager, is_built_in
from caldera.reward.default import scores_by_source
from caldera.reward_score.requirements import check_scorer
from caldera.trainer.ppo.truths import check_truths, is_judged

__all__ = ["check_columns"]

SHOWN = 8  # data sources of a file, in an error


def check_columns(
    config: PPOTrainerConfig,
    manager: RewardManager,
    train_set: Any,
    val_set: Any,
    agents_may_score: bool,
) -> None:
    """The files have what would else be missed with the first answers: the columns that rewards
    need, data sources that a scorer serves, and prompts that fit.

    A manager or a data set of the user's own may do without, and so may rows that an agent loop
    scores. A reward model of the run's own knows no columns, but validation does not ask it.
    """
    trainer, reward_model = config.trainer, config.reward_model
    scored = manager if is_built_in(manager) and not agents_may_score else None
    if not trainer.val_only and type(train_set) is RLHFDataset:
        train_set.check_prompts()
        if scored is not None and (reward_model.is_served or not reward_model.enable):
            _check_scored(config, scored, train_set, "data.train_files")
    validates = trainer.val_only or trainer.val_before_train or trainer.test_freq > 0
    if validates and type(val_set) is RLHFDataset:
        val_set.check_prompts()
        _require_source(config, val_set)  # which names the metrics
        if scored is not None:
            _check_scored(config, scored, val_set, "data.val_files")


def _require_source(config: PPOTrainerConfig, dataset: RLHFDataset) -> None:
    dataset.require_column(config.data.reward_fn_key, "named by data.reward_fn_key")


def _check_scored(
    config: PPOTrainerConfig, manager: NaiveRewardManager, dataset: RLHFDataset, files: str
) -> None:
    """Every row has what its scorer reads, and a scorer."""
    _require_source(config, dataset)
    dataset.require_column("reward_model", "which holds the ground truth")
    check_truths(config, manager, dataset, files)
    if not scores_by_source(manager.compute_score):
        return
    key = config.data.reward_fn_key
    for file, rows in dataset.first_rows(key).items():
        for source, row in rows.items():
            if is_judged(config, row):
                continue
            try:
                check_scorer(source, row["reward_model"]["ground_truth"], manager.reward_kwargs)
            except (ConfigError, DataError) as error:
                found = ", ".join([repr(name) for name in rows][:SHOWN])
                more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
                raise type(error)(f"{file}, with {key} {found}{more}: {error}") from error
