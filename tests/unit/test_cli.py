"""`caldera` itself: what it says to somebody who has never seen it."""

from __future__ import annotations

import pytest

from caldera import __version__
from caldera.cli import COMMANDS, main
from caldera.installation import version_line


def test_without_a_command_it_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n    {name}" in shown for name in COMMANDS)
    assert "caldera demo" in shown


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_how_long_the_demo_takes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "in about two minutes" in capsys.readouterr().out


def test_a_command_that_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    for given, told in (("trian", "did you mean train?"), ("xyz", "`caldera --help` lists them")):
        with pytest.raises(SystemExit, match="2"):
            main([given])
        assert told in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"caldera {version_line(__version__)}\n"


@pytest.mark.parametrize("command", ["generate", "eval", "serve", "sft", "rm", "dpo"])
def test_what_is_required_is_among_the_first_keys(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    _, _, keys = capsys.readouterr().out.partition("Keys that most runs set:")
    first, _, others = keys.partition("other keys:")
    assert "Required." in first and "Required." not in others
