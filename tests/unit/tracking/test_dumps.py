from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caldera.errors import DataError
from caldera.tracking import dump_generations, select_val_generations, write_jsonl_atomic
from caldera.tracking.dumps import read_jsonl


def test_rows_survive_a_round_trip(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "Grüße \u2028 \n\r #### 7", "n": 1},
        {"text": "half \udc80 a pair", "n": None},
    ]
    path = tmp_path / "new" / "rows.jsonl"
    write_jsonl_atomic(path, rows)
    assert read_jsonl(path) == rows
    assert "Grüße" in path.read_text(encoding="utf-8")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl_atomic(path, [{"n": 1}])

    def rows() -> Iterator[dict[str, int]]:
        yield {"n": 2}
        raise OSError("interrupted")

    with pytest.raises(OSError, match="interrupted"):
        write_jsonl_atomic(path, rows())
    assert read_jsonl(path) == [{"n": 1}]
    assert list(tmp_path.iterdir()) == [path]


def test_generation_dump_writes_one_object_a_sample(tmp_path: Path) -> None:
    folder = tmp_path / "validation"
    extras: dict[str, Any] = {"acc": np.array([1.0, 0.0]), "score": [9, 9], "uid": ["u0", "u1"]}
    scores: Any = np.array([1.0, 0.5])
    dump_generations(folder, 20, ["p", "q"], ["a", "b"], ["7", None], scores, extras)
    dump_generations(folder, 40, ["p"], ["c"], [{"target": ["x"]}], [np.float32(0.25)])
    first = [
        json.loads(line) for line in (tmp_path / "validation/20.jsonl").read_text().splitlines()
    ]
    assert first == [
        {
            "input": "p",
            "output": "a",
            "gts": "7",
            "score": 1.0,
            "step": 20,
            "acc": 1.0,
            "uid": "u0",
        },
        {
            "input": "q",
            "output": "b",
            "gts": None,
            "score": 0.5,
            "step": 20,
            "acc": 0.0,
            "uid": "u1",
        },
    ]
    assert list(first[0]) == ["input", "output", "gts", "score", "step", "acc", "uid"]
    second = read_jsonl(tmp_path / "validation/40.jsonl")
    assert second[0]["gts"] == {"target": ["x"]} and second[0]["score"] == 0.25
    assert sorted(p.name for p in (tmp_path / "validation").iterdir()) == ["20.jsonl", "40.jsonl"]


def test_generation_dump_refuses_columns_of_other_lengths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="step 3: column 'acc' has 1 values for 2 samples"):
        dump_generations(tmp_path, 3, ["p", "q"], ["a", "b"], ["", ""], [0.0, 1.0], {"acc": [1.0]})
    with pytest.raises(DataError, match="'output' has 1 values"):
        dump_generations(tmp_path, 3, ["p", "q"], ["a"], ["", ""], [0.0, 1.0])
    assert not list(tmp_path.iterdir())


def test_a_dump_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="type object cannot be written as JSON"):
        dump_generations(tmp_path, 1, ["p"], ["a"], [object()], [0.0])
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        dump_generations(tmp_path / "file", 1, ["p"], ["a"], ["7"], [0.0])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_selected_generations_are_those_of_a_seeded_shuffle() -> None:
    inputs = ["c", "a", "d", "b", "e"]
    outputs = [f"answer to {name}" for name in inputs]
    scores = [2.0, 0.0, 3.0, 1.0, 4.0]
    by_input = [(name, f"answer to {name}", float(k)) for k, name in enumerate("abcde")]
    np.random.RandomState(42).shuffle(by_input)
    assert select_val_generations(inputs, outputs, scores, 3) == by_input[:3]
    assert len(select_val_generations(inputs, outputs, scores, 99)) == 5
    assert select_val_generations(inputs, outputs, scores, 0) == []
