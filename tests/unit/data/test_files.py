from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caldera.data import read_rows
from caldera.errors import DataError

KEY = "data.train_files"
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": ["1", "2"]}},
    {"prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": ["3"]}},
]


def test_the_three_formats_hold_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "d.json").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("a.parquet", "b.json", "c.jsonl", "d.json"):
        assert read_rows(str(tmp_path / name), key=KEY).rows == ROWS, name


def test_parquet_of_pandas_comes_out_as_plain_lists_and_dicts(tmp_path: Path) -> None:
    pd.DataFrame(ROWS).to_parquet(tmp_path / "a.parquet")
    row = read_rows(str(tmp_path / "a.parquet"), key=KEY).rows[0]
    assert type(row["prompt"]) is list
    assert type(row["prompt"][0]) is dict
    assert type(row["reward_model"]["ground_truth"]) is list


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x": "one\u2028two"}, ensure_ascii=False), encoding="utf-8")
    assert read_rows(str(path), key=KEY).rows == [{"x": "one\u2028two"}]


def test_files_are_concatenated_and_missing_columns_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2, "y": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"z": 5, "x": 4}\n')
    table = read_rows([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], key=KEY)
    assert table.rows == [
        {"x": 1, "y": None, "z": None},
        {"x": 2, "y": 3, "z": None},
        {"x": 4, "y": None, "z": 5},
    ]
    assert table.where(1) == f"row 1 of {tmp_path / 'a.jsonl'}"
    assert table.where(2) == f"row 0 of {tmp_path / 'b.jsonl'}"


def test_home_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    assert read_rows("~/a.jsonl", key=KEY).rows == [{"x": 1}]
    assert read_rows(f"file://{tmp_path}/a.jsonl", key=KEY).rows == [{"x": 1}]


def test_a_missing_file_names_the_key_and_the_near_files(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / "trian.parquet"), key=KEY)
    message = str(caught.value)
    assert KEY in message
    assert str(tmp_path / "trian.parquet") in message
    assert "train.parquet" in message
    assert "notes.txt" not in message


def test_a_missing_folder_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"nor does its folder {tmp_path / 'no'}"):
        read_rows(str(tmp_path / "no" / "a.jsonl"), key=KEY)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"has no data files \(.parquet, .*; it holds notes.txt$"):
        read_rows(str(tmp_path), key=KEY)
    (tmp_path / "a.jsonl").write_text('{"x": 1}')
    assert read_rows(str(tmp_path), key=KEY).where(0) == f"row 0 of a.jsonl of {tmp_path}"


def test_an_unknown_extension_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.xls").touch()
    with pytest.raises(DataError, match=r"'.xls'; known are .parquet, .json, .jsonl"):
        read_rows(str(tmp_path / "a.xls"), key=KEY)


def test_values_of_a_csv_file_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\n"1,\n2",007\nb,\n')
    assert read_rows(str(tmp_path / "a.csv"), key=KEY).rows == [
        {"prompt": "1,\n2", "answer": "007"},
        {"prompt": "b", "answer": ""},
    ]
    for wrong in ("prompt,answer\na\n", "prompt\na,b\n"):
        (tmp_path / "a.csv").write_text(wrong)
        with pytest.raises(DataError, match="line 2 has not as many values as the first line"):
            read_rows(str(tmp_path / "a.csv"), key=KEY)


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_as_a_stream_and_as_a_file(tmp_path: Path, kind: Any) -> None:
    table = pa.Table.from_pylist([{"x": [1]}, {"x": None}])
    with kind(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert read_rows(str(tmp_path / "a.arrow"), key=KEY).rows == [{"x": [1]}, {"x": None}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"no parquet", "cannot read"),
        ("a.jsonl", b'{"x": 1}\n{"x": \n', "line 2: Expecting value"),
        ("a.jsonl", b"3\n", "line 1 is a int, not an object"),
        ("a.json", b'[{"x": 1}, "y"]', "element 1 is a str, not an object"),
        ("a.json", b'[{"x": 1}', "cannot read"),
        ("a.jsonl", b"\xff\xfe{}", "cannot read"),
    ],
)
def test_an_unreadable_file(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_rows(str(tmp_path / name), key=KEY)
    assert KEY in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_no_rows_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"data.train_files: the data set has no rows \(.*a.jsonl"):
        read_rows(str(tmp_path / "a.jsonl"), key=KEY)
    with pytest.raises(DataError, match="no files"):
        read_rows([], key=KEY)


def test_a_missing_column_names_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": 1, "answer": 2}\n')
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / "a.jsonl"), key=KEY, required={"prompt": "data.prompt_key"})
    message = str(caught.value)
    assert "data.prompt_key='prompt'" in message
    assert str(tmp_path / "a.jsonl") in message
    assert "question, answer" in message


def test_compressed_json(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    assert read_rows(str(tmp_path / "a.jsonl.gz"), key=KEY).rows == ROWS
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    with pytest.raises(DataError, match=r"data.train_files: cannot read .*b.jsonl.gz"):
        read_rows(str(tmp_path / "b.jsonl.gz"), key=KEY)
