"""What a user is told of a wrong config, word by word.

Each file of tests/golden/config has two lines: arguments, which come after the required ones, and
the message. `UPDATE_GOLDEN=1` writes the messages anew, to be read before they are kept.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from caldera.config import CONFIG_DIR, load_config
from caldera.config.migrate import groups_of, moved_to
from caldera.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "golden" / "config"
CASES = {path.stem: path for path in sorted(FOLDER.glob("*.txt"))}


def message_of(arguments: list[str], required: list[str]) -> str:
    """What is said of the arguments; the folder of the YAML files is left out."""
    name = "ppo_trainer"
    if arguments[0].startswith("--config-name="):
        name = arguments.pop(0).partition("=")[2]
    with pytest.raises(ConfigError) as raised:
        load_config([*required, *arguments], name)
    return str(raised.value).replace(str(CONFIG_DIR), "CONFIG_DIR")


def test_there_are_many() -> None:
    assert len(CASES) >= 90


@pytest.mark.parametrize("path", CASES.values(), ids=CASES)
def test_the_message_is_the_recorded_one(path: Path, required: list[str]) -> None:
    line, *recorded = path.read_text(encoding="utf-8").splitlines()
    message = message_of(shlex.split(line), required)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        aside = path.with_suffix(".part")
        aside.write_text(f"{line}\n{message}\n", encoding="utf-8")
        aside.replace(path)
        recorded = [message]
    assert [message] == recorded


@pytest.mark.parametrize("path", CASES.values(), ids=CASES)
def test_the_message_names_a_key_of_the_line(path: Path) -> None:
    """Or its group, or its place here."""
    line, message = path.read_text(encoding="utf-8").splitlines()
    keys = [argument.partition("=")[0].lstrip("+") for argument in shlex.split(line)]
    names = {name for key in keys for name in (*groups_of([f"{key}."]), moved_to(key) or key)}
    precise = [name for name in names if "." in name or name in keys]
    assert any(name in message for name in precise)
