"""The one console of the process: lines and live bars share it, so neither tears the other."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

__all__ = [
    "CONSOLE", "LogHandler", "can_draw_live", "format_number", "print_line", "print_table"
]  # fmt: skip

# Without an explicit file it follows sys.stdout, wherever that points at the time of writing.
CONSOLE = Console()
WITHOUT_EDGE = 100_000


def print_line(text: str) -> None:
    """Print one plain line; while a live bar is on, the line appears above it."""
    CONSOLE.print(Text(text), soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table; only a terminal has an edge at which its cells are broken into lines."""
    console = CONSOLE if is_terminal() else Console(file=CONSOLE.file, width=WITHOUT_EDGE)
    console.print(table)


class LogHandler(RichHandler):
    """Log messages in colour and within the window; a line a message where there is none."""

    def __init__(self) -> None:
        super().__init__(console=CONSOLE, show_path=False, show_time=False)

    def emit(self, record: logging.LogRecord) -> None:
        if is_terminal():
            super().emit(record)
        else:
            print_line(f"{record.levelname:<8} {self.format(record)}")


def is_terminal() -> bool:
    """The file itself is asked: rich also says yes when FORCE_COLOR is set and it is a log."""
    return CONSOLE.file.isatty()


def can_draw_live() -> bool:
    """Whether standard output is a terminal that can redraw a line."""
    return is_terminal() and not CONSOLE.is_dumb_terminal


def format_number(value: float) -> str:
    """Integers and large numbers whole, everything else to five significant digits."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"
