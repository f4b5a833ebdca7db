"""Data in memory as the rows of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest

from caldera.api.datasets import prompts_of, rows_of, write_rows
from caldera.errors import DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 3},
    {"prompt": "2+2=", "answer": "4", "level": 5},
]


class HuggingFace:
    """Has the method by which a `datasets.Dataset` gives its rows."""

    def to_list(self) -> list[dict[str, object]]:
        return list(ROWS)


@pytest.mark.parametrize(
    "data",
    [ROWS, iter(ROWS), pandas.DataFrame(ROWS), pyarrow.Table.from_pylist(ROWS), HuggingFace()],
    ids=["list", "iterator", "pandas", "pyarrow", "datasets"],
)
def test_every_form_of_rows(data: object) -> None:
    assert rows_of(data) == ROWS


def test_files_by_name(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(ROWS, file, "dataset")
    assert rows_of(file) == rows_of(str(file)) == rows_of([file]) == ROWS


def test_columns_reach_rewards_and_the_answer_is_the_ground_truth() -> None:
    prompts = prompts_of(ROWS)
    assert prompts.are_text and set(prompts.columns) == {"answer", "level", "index", "prompt"}
    assert prompts.rows[1] == {
        "prompt": "2+2=",
        "data_source": "data",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 1, "answer": "4", "level": 5, "prompt": "2+2="},
    }


def test_rows_in_verls_form_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "1+1="}]
    row = {
        "prompt": messages,
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 9, "split": "train"},
        "agent_name": "tool_agent",
    }
    prompts = prompts_of([row])
    assert not prompts.are_text
    assert prompts.rows == [
        row | {"extra_info": {"index": 9, "split": "train", "prompt": messages}}
    ]


def test_numpy_values_are_written_and_others_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows([{"a": np.int64(3), "b": np.array([1.5, 2.0])}], file, "dataset")
    assert json.loads(file.read_text()) == {"a": 3, "b": [1.5, 2.0]}
    with pytest.raises(DataError, match="dataset: row 0 holds what JSON has not, object"):
        write_rows([{"a": object()}], file, "dataset")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "dataset has no rows"),
        ({"train": ROWS}, "a split of a DatasetDict"),
        (3, "got int"),
        ([3], "row 0 is no dict, but 3"),
        ([{"question": "?"}], r"row 0 has no column 'prompt' .*its columns are question"),
    ],
)
def test_what_is_no_data_set_says_what_is(data: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        prompts_of(data)
