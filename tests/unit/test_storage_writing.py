from __future__ import annotations

from pathlib import Path

import pytest

from caldera.storage.writing import write_text_atomic, written_aside


def test_a_file_takes_its_place_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file.bin"
    with written_aside(path) as aside:
        aside.write_bytes(b"new")
        assert aside.parent == path.parent and not path.exists()
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_writers_of_one_file_do_not_share_what_they_write_aside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with written_aside(path) as one, written_aside(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"  # the first, which ends last


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text_atomic(path, ["old", "\n"])

    with pytest.raises(ValueError, match="half way"), written_aside(path) as aside:
        aside.write_text("new")
        raise ValueError("half way")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_utf8_does_not_have_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text_atomic(path, ["\ud83d"])
    assert path.read_text(encoding="utf-8") == "\\ud83d"
