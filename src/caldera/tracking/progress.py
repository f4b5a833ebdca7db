"""Progress for a person who waits: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from html import escape
from typing import Any, ClassVar, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from caldera.tracking.curves import Series, svg_curve

# ---- The one console of the process: lines and live bars share it, so neither tears the other

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


def in_notebook() -> bool:
    """Whether output goes to the cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


DRAWN = ("reward", "accuracy", "loss", "validation loss")
"""Numbers whose curve a notebook shows."""
SECONDS_BETWEEN_DRAWINGS = 1.0
LONGEST_BAR = 24
SHORTEST_BAR = 8
"""Cells; one that would be shorter says less than the room that it takes."""
SEPARATOR = " · "

T = TypeVar("T")


class TrainingProgress:
    """Step k of N with named numbers, elapsed time and ETA.

    On a terminal it is a bar at its foot, above which lines that are printed meanwhile appear; in a
    notebook the numbers and their curves, in the cell that runs.

    Where standard output is no terminal, a line every `seconds_between_lines` stands for the bar,
    without control characters, and the last state is always worth a line.
    """

    on_screen: ClassVar[bool] = False  # a second bar would need a rich that can nest them

    def __init__(
        self,
        total_steps: int,
        done_steps: int = 0,
        description: str = "Training",
        *,
        unit: str = "step",
        seconds_between_lines: float = 30.0,
    ) -> None:
        self._total = total_steps
        self._done_before = done_steps  # steps of an earlier process say nothing about our speed
        self._step = done_steps
        self._description, self._unit = description, unit
        self._details: list[str] = []
        self._history: dict[str, dict[float, float]] = {}  # name -> step -> value
        self._started = time.monotonic()
        self._expected_end: float | None = None
        # A wait that is shorter than the interval is one line, its last.
        self._interval, self._last_line = seconds_between_lines, self._started
        self._unprinted = False
        self._live: Live | None = None
        self._cell: Any = None  # of a notebook
        if can_draw_live() and not TrainingProgress.on_screen:
            drawn = partial(_drawn, self)
            self._live = Live(get_renderable=drawn, console=CONSOLE, refresh_per_second=4)

    def update(self, step: int, **fields: float) -> None:
        """Say that `step` steps are done, with the numbers to show beside it."""
        self._step = step
        self._details = [f"{_readable(name)} {format_number(v)}" for name, v in fields.items()]
        for name, value in fields.items():
            self._history.setdefault(_readable(name), {})[float(step)] = value
        now = time.monotonic()
        if step > self._done_before:
            seconds_per_step = (now - self._started) / (step - self._done_before)
            self._expected_end = now + seconds_per_step * (self._total - step)
        self._unprinted = self._live is None
        if self._unprinted and now - self._last_line >= self._interval:
            self._print(now)

    def _print(self, now: float) -> None:
        self._last_line, self._unprinted = now, False
        if self._cell is None:
            print_line(str(self))
        else:
            self._cell.update(self)

    def __str__(self) -> str:
        return " | ".join([self.head(), *self.clocks(), *self._details])

    def _repr_html_(self) -> str:
        curves = [
            svg_curve([Series(name, list(values.items()))], name, "step", name, 420, 220)
            for name, values in self._history.items()
            if name in DRAWN and len(values) > 1
        ]
        return f"<p>{escape(str(self))}</p><div>{''.join(curves)}</div>"

    @property
    def step(self) -> int:
        return self._step

    @property
    def total(self) -> int:
        return self._total

    def head(self, width: int | None = None) -> str:
        """`Training: step 3/10`; in no more cells than `width`, as far as the description goes."""
        done = f"{self._unit} {self._step}/{self._total}"
        if width is None or width >= cell_len(f"{self._description}: {done}"):
            return f"{self._description}: {done}"
        room = width - cell_len(f"…: {done}")
        return f"{set_cell_size(self._description, room)}…: {done}" if room > 0 else done

    def clocks(self) -> list[str]:
        """The elapsed time and the ETA, as of now."""
        now = time.monotonic()
        eta = "unknown" if self._expected_end is None else _clock(self._expected_end - now)
        return [f"elapsed {_clock(now - self._started)}", f"ETA {eta}"]

    def details(self) -> list[str]:
        """The named numbers of the last update."""
        return self._details

    def __enter__(self) -> TrainingProgress:
        self._started = time.monotonic()
        if in_notebook():
            from IPython.display import display

            self._cell, self._interval = display(self, display_id=True), SECONDS_BETWEEN_DRAWINGS
        elif self._live is not None:
            TrainingProgress.on_screen = True
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None and self._cell is None:
            self._live.stop()
            TrainingProgress.on_screen = False
        elif self._unprinted:
            self._print(time.monotonic())


def _drawn(progress: TrainingProgress) -> RenderableType:
    """Step, bar and clocks; below them the named numbers, so that 80 columns show everything."""
    head, clocks, width = progress.head(), SEPARATOR.join(progress.clocks()), CONSOLE.width
    cells = width - cell_len(head) - cell_len(clocks) - 2
    row: RenderableType = _one_line(_without_bar(progress, width))
    if cells >= SHORTEST_BAR:
        bar = ProgressBar(progress.total, progress.step, min(cells, LONGEST_BAR))
        row = Table.grid(padding=(0, 1))
        row.add_row(_one_line(head), bar, _one_line(clocks))
    details = progress.details()
    return Group(row, _one_line("  " + SEPARATOR.join(details))) if details else row


def _without_bar(progress: TrainingProgress, width: int) -> str:
    """Narrow windows: step and ETA stay, the elapsed time and the description give."""
    whole = SEPARATOR.join([progress.head(), *progress.clocks()])
    if cell_len(whole) <= width:
        return whole
    eta = f"{SEPARATOR}{progress.clocks()[-1]}"
    return progress.head(width - cell_len(eta)) + eta


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def progress_iter(iterable: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Pass the items on while showing how many are done, for waits such as filtering a data set."""
    with TrainingProgress(total, description=description, unit="item") as progress:
        for done, item in enumerate(iterable, start=1):
            yield item
            progress.update(done)


def _readable(name: str) -> str:
    return name.replace("_per_second", "/s").replace("_", " ")


def _clock(seconds: float) -> str:
    """`h:mm:ss`; a moment that has passed already is 0."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
