"""Where the metrics of a step go."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from caldera.errors import DataError
from caldera.registry import Registry
from caldera.tracking.console import format_number, print_line
from caldera.tracking.dumps import json_line, read_jsonl, write_jsonl_atomic

__all__ = ["LOGGERS", "ConsoleLogger", "FileLogger", "LoggedRun", "Logger"]


class Logger(Protocol):
    """Receives the metrics of every step."""

    def log(self, data: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """What a logger may know about the run that it logs."""

    project_name: str
    experiment_name: str
    config: dict[str, Any] | None
    """The resolved configuration, for loggers that keep it with the metrics."""
    run_dir: Path
    resume_step: int
    """The step of the checkpoint that the run goes on from; 0 for a run from the start."""


LOGGERS: Registry[Callable[[LoggedRun], Logger]] = Registry("trainer.logger")


@LOGGERS.register("console")
class ConsoleLogger:
    """One line a step: `step:3 - actor/entropy:0.6931 - ...`."""

    def __init__(self, run: LoggedRun) -> None:
        pass

    def log(self, data: dict[str, float], step: int) -> None:
        values = (f"{name}:{format_number(value)}" for name, value in data.items())
        print_line(" - ".join([f"step:{step}", *values]))

    def finish(self) -> None:
        pass


@LOGGERS.register("file")
class FileLogger:
    """One line of JSON a row, `{"step": N, "data": {...}}`, on disk as soon as it is logged."""

    def __init__(self, run: LoggedRun) -> None:
        path = _metrics_path(run)
        _rewind(path, run.resume_step)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def log(self, data: dict[str, float], step: int) -> None:
        self._file.write(json_line({"step": step, "data": data}))
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def _metrics_path(run: LoggedRun) -> Path:
    if path := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    if root := os.environ.get("VERL_FILE_LOGGER_ROOT"):
        return Path(root) / run.project_name / f"{run.experiment_name}.jsonl"
    return run.run_dir / "metrics.jsonl"


def _rewind(path: Path, resume_step: int) -> None:
    """Drop what the resumed run logs again.

    A run from the start logs its validation of step 0 again too, so nothing stays of the old file.
    """
    rows = read_jsonl(path) if resume_step > 0 and path.exists() else []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}: line {number} has no integer 'step': {row!r}")
    write_jsonl_atomic(path, [row for row in rows if row["step"] <= resume_step])
