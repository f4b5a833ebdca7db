"""What the data must hold for rewards, checked before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from caldera.config import PPOTrainerConfig
from caldera.data import RLHFDataset
from caldera.data.files import Row, first_of, is_null
from caldera.data.plain_rows import TRUTH
from caldera.errors import ConfigError, DataError
from caldera.reward import NaiveRewardManager, RewardManager, is_built_in
from caldera.reward.default import scores_by_source
from caldera.reward_score.routing import check_scorer, find_scorer, reads_truth

logger = logging.getLogger(__name__)


# ---- Rows whose ground truth or data source is missing, found before the run begins


def check_truths(
    config: PPOTrainerConfig, manager: NaiveRewardManager, dataset: Any, key: str
) -> None:
    """Raise DataError if a row lacks what the scorer of its data source reads. `key` names the
    files.

    A custom function may do without the value of a ground truth: where some rows have one, the
    others get a warning. A custom data set may add it to its items: their rows are checked when
    they are scored.
    """
    if type(dataset) is not RLHFDataset:
        return
    by_source = scores_by_source(manager.compute_score)
    sourceless: list[str] = []
    needed: dict[str, list[str]] = {}
    unread: list[str] = []
    for where, row in dataset.located_rows():
        source = row.get(config.data.reward_fn_key)
        if by_source and not isinstance(source, str):
            sourceless.append(f"{where} ({source!r})")
        elif not _has_truth(row):
            # Every scorer takes rows apart: without the key there is nothing to pass on.
            is_needed = not _has_key(row) or (
                by_source and _needs_truth(str(source)) and not is_judged(config, row)
            )
            if is_needed:
                needed.setdefault(str(source), []).append(where)
            else:
                unread.append(where)
    if sourceless:
        raise DataError(
            f"{key}: the column {config.data.reward_fn_key!r} (data.reward_fn_key), by which rows "
            f"find their scorer, holds no text in {first_of(sourceless)}: fill it, drop these "
            "rows, or set custom_reward_function.path to a custom function"
        )
    for source, places in needed.items():
        raise DataError(
            f"{key}: {len(places)} of the rows of data_source {source!r} have no ground truth "
            "(the column 'reward_model' has no ground_truth, or it is null, NaN or empty), which "
            f"their scorer needs: {first_of(places)}. Fill it, drop these rows, or set "
            "custom_reward_function.path to a function that does without"
        )
    if len(unread) < len(dataset) and unread:  # rewards of rows that all lack one do without
        logger.warning(
            "%s: reward_model.ground_truth is null, NaN or empty in %d rows, which the scorer gets "
            "as it is: %s",
            key,
            len(unread),
            first_of(unread),
        )


def _has_key(row: Row) -> bool:
    truth = row.get("reward_model")
    return isinstance(truth, Mapping) and "ground_truth" in truth


def _has_truth(row: Row) -> bool:
    return _has_key(row) and not is_null(row["reward_model"]["ground_truth"])


def is_judged(config: PPOTrainerConfig, row: Row) -> bool:
    """Whether a reward model judges the row instead."""
    return config.reward_model.enable and row["reward_model"].get("style") == "model"


def _needs_truth(source: str) -> bool:
    try:
        return reads_truth(find_scorer(source))
    except ConfigError:  # scoring says that nobody serves the source
        return False


OTHERWISE = (
    "or score without it: by a custom function (custom_reward_function.path=FILE.py) or a reward "
    "model (reward_model.enable=True)"
)
SHOWN = 8  # data sources of a file, in an error


def check_columns(
    config: PPOTrainerConfig,
    manager: RewardManager,
    train_set: Any,
    val_set: Any,
    agents_may_score: bool,
) -> None:
    """The files have what would else be missed with the first responses: the columns that rewards
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
        if scored is not None:
            _check_scored(config, scored, val_set, "data.val_files")


def _check_scored(
    config: PPOTrainerConfig, manager: NaiveRewardManager, dataset: RLHFDataset, files: str
) -> None:
    """Every row has what its scorer reads, and a scorer."""
    key = config.data.reward_fn_key
    if not scores_by_source(manager.compute_score):
        if dataset.has_column(TRUTH):
            check_truths(config, manager, dataset, files)
        return
    by_key = "which picks the scorer (data.reward_fn_key)"
    dataset.require_column(key, by_key, f"Add it (docs/rewards.md names the scorers), {OTHERWISE}")
    dataset.require_column(TRUTH, "which holds the ground truth", f"Add it, {OTHERWISE}")
    check_truths(config, manager, dataset, files)
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
