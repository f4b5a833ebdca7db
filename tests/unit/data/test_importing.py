from __future__ import annotations

import sys
from pathlib import Path

import pytest

from caldera.data import load_object
from caldera.errors import ConfigError

KEY = "custom_reward_function"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "scorer.py"
    path.write_text(
        "from collections import OrderedDict\n"
        "LIMIT = 3\n"
        "def compute_score(x): return x + 1\n"
        "def _hidden(): pass\n"
        "class Judge: pass\n"
    )
    return path


def test_a_file_by_path_and_by_url(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_object(str(source), "compute_score", KEY)(1) == 2
    assert load_object(f"file://{source}", "LIMIT", KEY) == 3
    monkeypatch.setenv("HOME", str(source.parent))
    assert load_object("~/scorer.py", "LIMIT", KEY) == 3


def test_a_file_runs_once_a_process(source: Path) -> None:
    judge = load_object(str(source), "Judge", KEY)
    assert load_object(f"file://{source}", "Judge", KEY) is judge


def test_a_package() -> None:
    assert load_object("pkg://collections.abc", "Mapping", KEY).__name__ == "Mapping"


def test_an_unknown_name_lists_what_there_is(source: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(str(source), "compute_scores", KEY)
    message = str(caught.value)
    assert message.startswith(f"{KEY}: {source} has no 'compute_scores'")
    assert "did you mean 'compute_score'?" in message
    assert message.endswith("it defines compute_score, Judge")


def test_no_name(source: Path) -> None:
    with pytest.raises(ConfigError, match="without a name; it defines compute_score, Judge"):
        load_object(str(source), None, KEY)


def test_a_missing_file(source: Path) -> None:
    with pytest.raises(ConfigError, match=f"does not exist; did you mean {source}?"):
        load_object(str(source.parent / "scorers.py"), "x", KEY)
    with pytest.raises(ConfigError, match="does not exist, nor does its folder"):
        load_object(str(source.parent / "no" / "scorer.py"), "x", KEY)


def test_what_is_no_python_file() -> None:
    with pytest.raises(ConfigError, match=rf"{KEY}: a.b.c is not a Python file; give .*pkg://"):
        load_object("a.b.c", "x", KEY)


def test_a_missing_package() -> None:
    with pytest.raises(ConfigError, match=f"{KEY}: pkg://no_such.module cannot be imported"):
        load_object("pkg://no_such.module", "x", KEY)


def test_mistakes_inside_the_module_keep_their_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken_module_of_mine.py"
    broken.write_text("import no_such_module_either\n")
    before = set(sys.modules)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        load_object(str(broken), "x", KEY)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        load_object("pkg://broken_module_of_mine", "x", KEY)
    assert {name for name in set(sys.modules) - before if "broken" in name} == set()
