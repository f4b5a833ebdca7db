"""The one console of the process: lines and live bars share it, so neither tears the other."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

__all__ = ["CONSOLE", "can_draw_live", "format_number", "print_line"]

# Without an explicit file it follows sys.stdout, wherever that points at the time of writing.
CONSOLE = Console()


def print_line(text: str) -> None:
    """Print one plain line; while a live bar is on, the line appears above it."""
    CONSOLE.print(Text(text), soft_wrap=True)


def can_draw_live() -> bool:
    """Whether standard output is a terminal that can redraw a line.

    The file itself is asked: rich also says yes when FORCE_COLOR is set and the output is a log.
    """
    return CONSOLE.file.isatty() and not CONSOLE.is_dumb_terminal


def format_number(value: float) -> str:
    """Integers and large numbers whole, everything else to five significant digits."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"
