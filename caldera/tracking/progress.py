"""Progress for a person who waits: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import ClassVar, TypeVar

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from caldera.tracking.console import CONSOLE, can_draw_live, format_number, print_line

__all__ = ["TrainingProgress", "progress_iter"]

T = TypeVar("T")


class TrainingProgress:
    """Step k of N with named numbers, elapsed time and ETA.

    Where standard output is no terminal, a line every `seconds_between_lines` stands for the bar.
    """

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
        self._title = f"{description}: {unit}"
        self._details: list[str] = []
        self._started = time.monotonic()
        self._expected_end: float | None = None
        self._display: _LiveBar | _PlainLines = (
            _LiveBar(self)
            if can_draw_live() and not _LiveBar.on_screen
            else _PlainLines(self, seconds_between_lines)
        )

    def update(self, step: int, **fields: float) -> None:
        """Say that `step` steps are done, with the numbers to show beside it."""
        self._step = step
        self._details = [f"{_readable(name)} {format_number(v)}" for name, v in fields.items()]
        now = time.monotonic()
        if step > self._done_before:
            seconds_per_step = (now - self._started) / (step - self._done_before)
            self._expected_end = now + seconds_per_step * (self._total - step)
        self._display.update()

    @property
    def step(self) -> int:
        return self._step

    @property
    def total(self) -> int:
        return self._total

    def head(self) -> str:
        """`Training: step 3/10`."""
        return f"{self._title} {self._step}/{self._total}"

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
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._display.stop()


class _LiveBar:
    """A bar at the foot of the terminal; lines printed meanwhile appear above it."""

    on_screen: ClassVar[bool] = False  # a second bar would need a rich that can nest them

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        self._bar = _BarOverDetails(progress)
        self._task = self._bar.add_task("", total=progress.total, completed=progress.step)

    def start(self) -> None:
        _LiveBar.on_screen = True
        self._bar.start()

    def update(self) -> None:
        self._bar.update(self._task, completed=self._progress.step)

    def stop(self) -> None:
        self._bar.stop()
        _LiveBar.on_screen = False


class _BarOverDetails(Progress):
    """The named numbers have a line of their own, so that 80 columns show everything."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        super().__init__(
            _TextOf(progress.head),
            BarColumn(bar_width=24),
            _TextOf(lambda: " · ".join(progress.clocks())),
            console=CONSOLE,
            refresh_per_second=4,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if details := self._progress.details():
            yield _one_line("  " + " · ".join(details))


class _TextOf(ProgressColumn):
    """A column whose text is asked for at every redraw, so that the clocks in it run."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return _one_line(self._text())


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


class _PlainLines:
    """Lines without control characters, rare enough for a log file."""

    def __init__(self, progress: TrainingProgress, seconds_between_lines: float) -> None:
        self._progress = progress
        self._interval = seconds_between_lines
        self._last_line = time.monotonic()  # a wait shorter than the interval is one line, its last
        self._unprinted = False

    def start(self) -> None:
        pass

    def update(self) -> None:
        self._unprinted = True
        if time.monotonic() - self._last_line >= self._interval:
            self._print()

    def stop(self) -> None:
        """The last state is always worth a line."""
        if self._unprinted:
            self._print()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        self._unprinted = False
        print_line(
            " | ".join([self._progress.head(), *self._progress.clocks(), *self._progress.details()])
        )


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
