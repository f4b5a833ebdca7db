"""Folders of data files and data sets of the hub: which files a name stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from caldera.data.files import read_rows
from caldera.errors import DataError
from tests.fake_hub import FakeHub, fake_hub

TRAIN, VAL = "data.train_files", "data.val_files"


def line(value: str) -> bytes:
    return json.dumps({"from": value}).encode()


def write(folder: Path, *names: str) -> str:
    """Files of one row, which tells the file."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(line(name))
    return str(folder)


def read(name: str, key: str = TRAIN) -> list[Any]:
    return [row["from"] for row in read_rows(name, key=key).rows]


def told(name: str, key: str = TRAIN) -> str:
    with pytest.raises(DataError) as raised:
        read_rows(name, key=key)
    return str(raised.value)


class TestFolders:
    def test_names_tell_splits(self, tmp_path: Path) -> None:
        names = ("train-0.jsonl", "train-1.jsonl", "dev.jsonl", "sub/test/a.jsonl", "notes.txt")
        folder = write(tmp_path, *names)
        assert read(folder) == ["train-0.jsonl", "train-1.jsonl"]
        assert read(folder, VAL) == ["sub/test/a.jsonl"]
        assert read(f"{folder}:validation") == ["dev.jsonl"]
        assert read(f"file://{folder}:test") == ["sub/test/a.jsonl"]
        assert told(f"{folder}:eval") == (
            f"{TRAIN}: {folder}:eval has no split 'eval'; it has validation, test, train"
        )

    def test_files_that_tell_no_split_are_train(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "a.jsonl", "b.jsonl", ".hidden.jsonl")
        assert read(folder) == read(f"{folder}:train") == ["a.jsonl", "b.jsonl"]
        assert read(folder, VAL) == ["a.jsonl", "b.jsonl"]  # the only split there is

    def test_a_config_is_a_folder(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl")
        assert read(f"{folder}:main/train") == ["main/train.jsonl"]
        assert "has no folder 'other'; it has main, socratic" in told(f"{folder}:other/train")

    def test_one_of_several_splits_is_to_be_chosen(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "test.jsonl", "dev.jsonl")
        assert told(folder) == (
            f"{TRAIN}: {folder} has the splits validation, test: choose one, such as "
            f"{folder}:validation"
        )

    def test_the_card_has_the_last_word(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "main/train-0.jsonl", "main/b.jsonl", "x/y/c.jsonl", "d.jsonl")
        (tmp_path / "README.md").write_text(
            "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n"
            "  - split: train\n    path: main/train-*\n  - split: hard\n    path: [main/b*]\n"
            "- config_name: other\n  data_files: '**/c.jsonl'\n"
            "- config_name: rest\n  data_dir: x\n---\n# Card\n"
        )
        assert read(f"{folder}:main/train") == ["main/train-0.jsonl"]
        assert read(f"{folder}:main/hard") == ["main/b.jsonl"]
        assert read(f"{folder}:other/train") == read(f"{folder}:rest/train") == ["x/y/c.jsonl"]
        assert told(folder) == (
            f"{TRAIN}: {folder} has the configs main, other, rest: choose one, such as "
            f"{folder}:main/train"
        )
        assert "has no config 'x'; it has main, other, rest" in told(f"{folder}:x/train")

    def test_a_file_with_a_colon_stays_a_file(self, tmp_path: Path) -> None:
        write(tmp_path, "a:train.jsonl")
        assert read(f"{tmp_path}/a:train.jsonl") == ["a:train.jsonl"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.chdir(tmp_path)
        running.data_sets["me/sums"] = {
            "README.md": b"# No front matter",
            "data/train-00000-of-00001.jsonl": line("train"),
            "data/test-00000-of-00001.jsonl": line("test"),
            "large.bin": b"-",
        }
        running.data_sets["me/sums@v1"] = {"train.jsonl": line("first")}
        yield running


class TestHub:
    def test_a_name_stands_for_the_files_of_a_split(self, hub: FakeHub) -> None:
        assert read("me/sums") == read("hf://datasets/me/sums:train") == ["train"]
        assert set(hub.asked) == {"README.md", "data/train-00000-of-00001.jsonl"}
        assert read("me/sums", VAL) == read("me/sums:test") == ["test"]
        assert read("me/sums@v1:train") == ["first"]
        assert read_rows("me/sums", key=TRAIN).where(0) == (
            "row 0 of train-00000-of-00001.jsonl of me/sums"
        )

    def test_without_a_network_the_cache_is_read(
        self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert read("me/sums:test") == ["test"]
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert read("me/sums:test") == ["test"]
        said = f"{TRAIN}: me/sums:train has no split 'train'; it has test"
        assert told("me/sums:train") == said

    def test_a_split_that_it_has_not(self, hub: FakeHub) -> None:
        said = f"{TRAIN}: me/sums:dev has no split 'dev'; it has test, train"
        assert told("me/sums:dev") == said

    def test_what_is_nowhere(self, hub: FakeHub, tmp_path: Path) -> None:
        said = told("me/products:train")
        assert said.startswith(
            f"{TRAIN}: me/products:train is no file or folder here, and could not be read from "
            "the Hugging Face Hub: "
        )
        assert "could not be read from the Hugging Face Hub: " in told("me/a..b")
        (tmp_path / "me").mkdir()  # where there is such a folder, it is a path
        assert "does not exist" in told("me/sums")
        assert read("hf://datasets/me/sums") == ["train"]
