"""Lines for a person at a terminal, and for the file or the program that takes them instead."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.table import Table

from caldera.tracking.progress import CONSOLE, LogHandler, print_table

LONG = "chosen for this machine: " + ", ".join(f"some.group.of.keys.number_{k}=1" for k in range(9))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes no terminal of a log
    logger = logging.Logger("test")
    logger.addHandler(LogHandler())
    return logger


def test_a_log_has_one_line_a_message(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.info("%s", LONG)
    log.warning("[short]")
    assert capsys.readouterr().out == f"INFO     {LONG}\nWARNING  [short]\n"


def test_a_terminal_wraps_them(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(CONSOLE, "_width", 60)
    log.info("%s", LONG)
    assert len(terminal.getvalue().splitlines()) > 5


def test_an_error_keeps_its_traceback(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        log.exception("it failed")
    out = capsys.readouterr().out
    assert out.startswith("ERROR    it failed\nTraceback")
    assert out.endswith("ValueError: no such thing\n")


def test_the_cells_of_a_table_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("what", "found")
    table.add_row("keys", LONG)
    print_table(table)
    assert LONG in capsys.readouterr().out
