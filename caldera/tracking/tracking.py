"""Tracking: the metrics of a run, sent to every logger that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from caldera.tracking.loggers import LOGGERS, LoggedRun, Logger

__all__ = ["Tracking"]


class Tracking:
    """Logs to one or more back ends (`trainer.logger`), named as in `LOGGERS`.

    With `resume_step`, back ends that keep rows drop those of later steps first.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: dict[str, Any] | None = None,
        run_dir: Path = Path("."),
        resume_step: int = 0,
    ) -> None:
        run = LoggedRun(project_name, experiment_name, config, Path(run_dir), resume_step)
        names = [default_backend] if isinstance(default_backend, str) else default_backend
        # All names are looked up before the first logger opens anything.
        factories = [LOGGERS[name] for name in dict.fromkeys(names)]
        with ExitStack() as opened:
            self._loggers: list[Logger] = []
            for factory in factories:
                self._loggers.append(factory(run))
                opened.callback(self._loggers[-1].finish)
            self._opened = opened.pop_all()

    def log(self, data: Mapping[str, SupportsFloat], step: int) -> None:
        """Send one row of metrics to every back end."""
        row = {name: _plain_number(value) for name, value in data.items()}
        for logger in self._loggers:
            logger.log(row, step)

    def finish(self) -> None:
        """Close every back end; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish()


def _plain_number(value: SupportsFloat) -> float:
    """Numpy scalars and tensors of one element become Python numbers; integers stay integers."""
    plain = value.item() if hasattr(value, "item") else value
    return plain if isinstance(plain, int | float) else float(plain)
