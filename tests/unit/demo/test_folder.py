"""The folder of a demo: whose it may be, and that one demo at a time writes to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from caldera.demo import run as demo
from caldera.errors import ConfigError
from caldera.storage.locks import locked_folder


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What is in the folder when a demo begins in it."""
    found: list[set[str]] = []

    def begin(_: object, output: Path, *rest: object) -> None:
        found.append({path.name for path in output.iterdir()})
        (output / "train.parquet").touch()

    monkeypatch.setattr(demo, "_run_in", begin)
    return found


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path, begun: list[set[str]]) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="no folder of a demo's, and the demo would empty it"):
        demo.run_demo("tiny", tmp_path, False, [])
    assert (tmp_path / "thesis.tex").is_file() and not begun


def test_a_demo_begins_in_an_empty_folder(tmp_path: Path, begun: list[set[str]]) -> None:
    demo.run_demo("tiny", tmp_path / "new", False, [])
    (tmp_path / "new" / "run").mkdir()
    demo.run_demo("tiny", tmp_path / "new", False, [])
    assert begun == [{".lock"}, {".lock"}]


def test_a_demo_that_runs_is_not_disturbed(tmp_path: Path, begun: list[set[str]]) -> None:
    (tmp_path / "train.parquet").touch()
    with locked_folder(tmp_path, "--output"), pytest.raises(ConfigError, match="another run is"):
        demo.run_demo("tiny", tmp_path, False, [])
    assert (tmp_path / "train.parquet").is_file() and not begun
