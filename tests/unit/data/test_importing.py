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


MISTAKES = {
    "import no_such_module_either": "ModuleNotFoundError: No module named 'no_such_module_either'",
    "def compute_score(:": "SyntaxError: invalid syntax",
    "    x = 1": "IndentationError: unexpected indent",
    "import json; json.loads('{')": "JSONDecodeError: Expecting property name",
    "raise OSError": "OSError",
    "import sys; sys.exit('no GPU')": "SystemExit: no GPU",
}


@pytest.mark.parametrize("line", MISTAKES)
@pytest.mark.parametrize("scheme", ["", "pkg://"])
def test_mistakes_inside_the_module_are_told_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, scheme: str
) -> None:
    broken = tmp_path / "broken_module_of_mine.py"
    broken.write_text(f"LIMIT = 3\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = f"pkg://{broken.stem}" if scheme else str(broken)
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        load_object(path, "x", KEY)
    message = str(caught.value)
    assert message.startswith(f"{KEY}: {path} cannot be imported: {MISTAKES[line]}")
    assert message.endswith(f" ({broken}:2)")
    assert caught.value.__cause__ is not None  # for those who want the traceback
    assert {name for name in set(sys.modules) - before if "broken" in name} == set()


def test_a_mistake_in_what_the_module_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, mine = tmp_path / "helper_of_mine.py", tmp_path / "imports_a_helper.py"
    mine.write_text("\nimport helper_of_mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    for text, said in [("1 / 0", "ZeroDivisionError: division by zero"), ("(", "SyntaxError: ")]:
        helper.write_text(f"\n\n{text}\n")
        with pytest.raises(ConfigError) as caught:
            load_object(str(mine), "x", KEY)
        assert f"{KEY}: {mine} cannot be imported: {said}" in str(caught.value)
        assert str(caught.value).endswith(f" ({helper}:3)")


def test_whoever_interrupts_an_import_is_heard(tmp_path: Path) -> None:
    slow = tmp_path / "slow_module_of_mine.py"
    slow.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_object(str(slow), "x", KEY)
