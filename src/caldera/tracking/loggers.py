"""Where the metrics of a step go."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeAlias

from caldera.errors import DataError
from caldera.registry import Registry
from caldera.storage.locks import locked_file
from caldera.tracking.dumps import json_line, read_jsonl, write_jsonl_atomic
from caldera.tracking.progress import format_number, print_line

logger = logging.getLogger(__name__)
Generation: TypeAlias = tuple[str, str, float]
"""(input, output, score) of a validation answer."""
GENERATION_COLUMNS = ("step", "input", "output", "score")
GENERATIONS = "val/generations"
"""What back ends call the table of validation answers."""


PATH_VARIABLE, ROOT_VARIABLE = "VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"


SHORT, ALL = "short", "all"


SHORT_METRICS = (
    "critic/score/mean",
    "val-core/*",
    "response_length/mean",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/lr",
    "perf/throughput",
    "perf/time_per_step",
    "perf/max_memory_allocated_gb",
    "train/*",
    "val/*",
    "tracking/lost_rows",
)
"""What `short` stands for: about ten numbers a step, of which a run has those of its kind."""


class Logger(Protocol):
    """Receives the metrics of every step, and the responses that a validation shows."""

    def log(self, data: dict[str, float], step: int) -> None: ...

    def log_generations(self, samples: Sequence[Generation], step: int) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """The facts of a run that a logger may need."""

    project_name: str
    experiment_name: str
    config: dict[str, Any] | None
    """The resolved configuration, for loggers that keep it with the metrics."""
    run_dir: Path
    resume_step: int
    """The step of the checkpoint that the run goes on from; 0 for a run from the start."""
    console_metrics: Sequence[str] = (ALL,)
    """The metrics on the console: `short`, `all` or patterns of metrics."""


LOGGERS: Registry[Callable[[LoggedRun], Logger]] = Registry("trainer.logger")


@LOGGERS.register("console")
class ConsoleLogger:
    """One line a step: `step:3 - actor/entropy:0.6931 - ...`."""

    def __init__(self, run: LoggedRun) -> None:
        words = {SHORT: SHORT_METRICS, ALL: ("*",)}
        self._patterns = [p for word in run.console_metrics for p in words.get(word, (word,))]

    def log(self, data: dict[str, float], step: int) -> None:
        """The metrics in the order of the patterns; a row of others alone is left out."""
        chosen = dict.fromkeys(
            name for pattern in self._patterns for name in data if fnmatchcase(name, pattern)
        )
        values = [f"{name}:{format_number(data[name])}" for name in chosen]
        if values:
            print_line(" - ".join([f"step:{step}", *values]))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        for prompt, output, score in samples:
            print_line(f"[validation, step {step}, score {score:g}] {prompt}\n{output}")

    def finish(self) -> None:
        pass


@LOGGERS.register("file")
class FileLogger:
    """One line of JSON a row, `{"step": N, "data": {...}}`, on disk as soon as it is logged.

    Validation responses go into NAME.generations.jsonl beside it, one a line.
    """

    def __init__(self, run: LoggedRun) -> None:
        path, variable = _metrics_path(run)
        self._lock = ExitStack()
        if variable:  # the run's own folder is locked already
            self._lock.enter_context(locked_file(path, f"{variable}: {path}"))
        _rewind(path, run.resume_step)
        self._generations = path.with_suffix(".generations.jsonl")
        if self._generations.exists():
            _rewind(self._generations, run.resume_step)
        self._file = _open_to_append(path)

    def log(self, data: dict[str, float], step: int) -> None:
        self._file.write(json_line({"step": step, "data": data}))
        self._file.flush()

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        with _open_to_append(self._generations) as file:
            for sample in samples:
                file.write(json_line(dict(zip(GENERATION_COLUMNS, (step, *sample), strict=True))))

    def finish(self) -> None:
        self._file.close()
        self._lock.close()


def _open_to_append(path: Path) -> TextIO:
    # A lone surrogate in a decoded response is no UTF-8; its backslash form is valid JSON.
    return path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def _metrics_path(run: LoggedRun) -> tuple[Path, str]:
    """The file, and the variable that names it, if one does."""
    if path := os.environ.get(PATH_VARIABLE):
        return Path(path), PATH_VARIABLE
    if root := os.environ.get(ROOT_VARIABLE):
        file = Path(root) / run.project_name / f"{run.experiment_name}.jsonl"
        return file, ROOT_VARIABLE
    return run.run_dir / "metrics.jsonl", ""


def _rewind(path: Path, resume_step: int) -> None:
    """Drop what the resumed run logs again. A run from the start keeps an earlier run's file, under
    another name."""
    if resume_step == 0 and path.exists() and path.stat().st_size > 0:
        numbered = (path.with_suffix(f".{number}{path.suffix}") for number in count(1))
        aside = next(name for name in numbered if not name.exists())
        path.rename(aside)
        logger.warning("%s was of an earlier run: it is %s now", path, aside.name)
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}: line {number} has no integer 'step': {row!r}")
    write_jsonl_atomic(path, [row for row in rows if row["step"] <= resume_step])
