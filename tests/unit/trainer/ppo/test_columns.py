"""Columns that the reward needs are missed before the run begins, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from caldera.config import PPOTrainerConfig
from caldera.data import RLHFDataset
from caldera.demo.arithmetic import build_tokenizer
from caldera.errors import DataError
from caldera.reward import BatchRewardManager, NaiveRewardManager
from caldera.trainer.ppo.columns import check_columns

SOURCE, TRUTH = "data_source", "reward_model"
EVERY = {(column, file) for column in (SOURCE, TRUTH) for file in ("train", "val")}


class Own(NaiveRewardManager):
    """A manager that the user derived."""


class OwnData(RLHFDataset):
    """A data set that may add columns to its rows."""


class Case:
    """A run whose files lack columns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = PPOTrainerConfig()
        self.config.data.train_files = [str(folder / "train.jsonl")]
        self.config.data.val_files = [str(folder / "val.jsonl")]
        self.config.data.dataloader_num_workers = 0
        self.tokenizer = build_tokenizer()
        self.manager: Any = NaiveRewardManager(self.tokenizer, 0)
        self.kind = RLHFDataset
        self.agents = False

    def missed(self, column: str, file: str) -> bool:
        """Whether the check misses the column in that file; it is in the other one."""
        row = {"prompt": [{"role": "user", "content": "1+1="}], SOURCE: "s", TRUTH: {}}
        other = {"train": "val", "val": "train"}[file]
        (self.folder / f"{other}.jsonl").write_text(json.dumps(row))
        del row[column]
        (self.folder / f"{file}.jsonl").write_text(json.dumps(row))
        data = self.config.data
        train, val = (
            self.kind(f, self.tokenizer, data) for f in (data.train_files, data.val_files)
        )
        try:
            check_columns(self.config, self.manager, train, val, self.agents)
        except DataError as error:
            told = f"data.{file}_files: {self.folder}/{file}.jsonl has no column '{column}', "
            assert str(error).startswith(told)
            return True
        return False

    def all_missed(self) -> set[tuple[str, str]]:
        return {(column, file) for column, file in EVERY if self.missed(column, file)}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("kind", [NaiveRewardManager, BatchRewardManager])
def test_managers_need_both_columns_of_both_files(case: Case, kind: Any) -> None:
    case.manager = kind(case.tokenizer, 0)
    assert case.all_missed() == EVERY


def test_the_key_of_the_source_is_heeded(case: Case) -> None:
    case.config.data.reward_fn_key = "prompt"
    assert case.all_missed() == {(TRUTH, "train"), (TRUTH, "val")}


def test_files_that_are_not_read(case: Case) -> None:
    trainer = case.config.trainer
    trainer.val_before_train, trainer.test_freq = False, -1
    assert case.all_missed() == {(SOURCE, "train"), (TRUTH, "train")}
    trainer.val_only = True
    assert case.all_missed() == {(SOURCE, "val"), (TRUTH, "val")}


def test_a_reward_model_needs_no_columns_to_train_unless_it_is_served(case: Case) -> None:
    case.config.reward_model.enable = True
    assert case.all_missed() == {(SOURCE, "val"), (TRUTH, "val")}
    case.config.reward_model.rollout.name = "vllm"
    assert case.all_missed() == EVERY


def test_validation_is_named_by_source_whoever_scores(case: Case) -> None:
    case.manager = Own(case.tokenizer, 0)
    assert case.all_missed() == {(SOURCE, "val")}
    case.manager = NaiveRewardManager(case.tokenizer, 0)
    case.agents = True
    assert case.all_missed() == {(SOURCE, "val")}


def test_a_data_set_of_ones_own_may_add_them(case: Case) -> None:
    case.kind = OwnData
    assert case.all_missed() == set()
