from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from caldera.data.prepare import LengthLimit, prepare
from caldera.errors import DataError, RegistryError

RAW = Path(__file__).parents[3] / "data/raw"


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def write_raw(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def test_long_prompts_are_dropped_and_the_others_keep_their_index(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    everything = rows_of(prepare("gsm8k", raw=RAW / "gsm8k", output=tmp_path / "all")[0])
    # <user>, the characters, <assistant>
    lengths = [len(row["prompt"][0]["content"]) + 2 for row in everything]
    limit = sorted(lengths)[len(lengths) // 2]
    for processes in (1, 2):
        files = prepare(
            "gsm8k",
            raw=RAW / "gsm8k",
            output=tmp_path / "short",
            length_limit=LengthLimit(tokenizer, limit, processes),
        )
        expected = [row for row, n in zip(everything, lengths, strict=True) if n <= limit]
        assert 0 < len(expected) < len(everything)
        assert rows_of(files[0]) == expected


def test_a_limit_that_no_prompt_keeps_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=r"dropped all 24 prompts.* and --max-prompt-length is 3"):
        prepare(
            "gsm8k",
            raw=RAW / "gsm8k",
            output=tmp_path,
            length_limit=LengthLimit(tokenizer, 3),
        )
    assert list(tmp_path.glob("*.parquet")) == []


def test_the_first_rows_of_each_split(tmp_path: Path) -> None:
    files = prepare("mbpp", raw=RAW / "mbpp", output=tmp_path, limit=2)
    tasks = {file.stem: [r["extra_info"]["task_id"] for r in rows_of(file)] for file in files}
    assert tasks == {"train": [601, 602], "validation": [511, 512], "test": [11, 12]}


def test_media_columns_are_carried_through(tmp_path: Path) -> None:
    images = [{"bytes": b"\x89PNG", "path": None}]
    raw = {"question": "How many? <image>", "answer": "#### 2", "videos": ["a.mp4"]}
    folder = write_raw(tmp_path / "raw", [raw | {"images": []}, raw | {"images": images}])
    (file,) = prepare("gsm8k", raw=folder, output=tmp_path)
    assert [row["images"] for row in rows_of(file)] == [[], images]
    assert [row["videos"] for row in rows_of(file)] == [["a.mp4"], ["a.mp4"]]


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    prepare("gsm8k", raw=RAW / "gsm8k", output=tmp_path / "a/b", limit=3)
    prepare("gsm8k", raw=RAW / "gsm8k", output=tmp_path / "a/b", limit=2)
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]
    assert len(rows_of(tmp_path / "a/b/train.parquet")) == 2


def test_a_split_without_a_raw_file_is_missing_from_the_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_raw(tmp_path / "raw", [{"question": "1?", "answer": "#### 1"}])
    assert prepare("gsm8k", raw=folder, output=tmp_path) == [tmp_path / "train.parquet"]
    assert "no test split" in caplog.text and "test.* (.parquet" in caplog.text


def test_wrong_folders_and_names(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="unknown data set 'gsm9k'; did you mean 'gsm8k'"):
        prepare("gsm9k", raw=tmp_path, output=tmp_path / "out")
    with pytest.raises(DataError, match=r"--raw=.*nowhere: there is no such folder"):
        prepare("gsm8k", raw=tmp_path / "nowhere", output=tmp_path / "out")
    with pytest.raises(DataError, match=r"--raw=.*: the folder has no train.\* or test.\* "):
        prepare("gsm8k", raw=tmp_path, output=tmp_path / "out")
    with pytest.raises(DataError, match=r"--output=.* is the folder of the raw files"):
        prepare("gsm8k", raw=RAW / "gsm8k", output=RAW / "mbpp/../gsm8k")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"--output: cannot write .*file"):
        prepare("gsm8k", raw=RAW / "gsm8k", output=tmp_path / "file/out")


def test_a_split_that_would_be_empty_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps({"task_id": 1}))
    with pytest.raises(DataError, match=r"mbpp.jsonl has no rows for the train split of mbpp"):
        prepare("mbpp", raw=tmp_path, output=tmp_path / "out")


def test_without_the_library_the_hub_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"--hub needs the package datasets: pip install .*--raw"):
        prepare("gsm8k", output=tmp_path)


class HubStandIn(ModuleType):
    """Answers as the library does, from one row."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, name: str | None, split: str) -> HubStandIn:
        if split == "test":
            raise ConnectionError("no route to the hub\nand more")
        self.asked.append((path, name, split))
        return self

    def with_format(self, kind: str) -> pa.Table:
        assert kind == "arrow"
        return pa.Table.from_pylist([{"question": "1?", "answer": "#### 1"}])


def test_the_hub_is_asked_for_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = HubStandIn()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match=r"--hub: cannot load openai/gsm8k: no route to the hub$"):
        prepare("gsm8k", output=tmp_path)
    assert hub.asked == [("openai/gsm8k", "main", "train")]
    assert rows_of(tmp_path / "train.parquet")[0]["reward_model"]["ground_truth"] == "1"
