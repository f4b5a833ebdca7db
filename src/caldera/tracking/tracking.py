"""Tracking: the metrics of a run, sent to every logger that the configuration names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from caldera.errors import UnsupportedError
from caldera.tracking.backends import require_package
from caldera.tracking.background import BackgroundLogger, PromptLogger
from caldera.tracking.loggers import ALL, LOGGERS, SHORT, Generation, LoggedRun

logger = logging.getLogger(__name__)


# ---- Where the metrics of a step go


PROMPT = ("console", "file")
"""Loggers without a server: their rows are out when `log` returns."""
REFUSED = {
    "vemlp_wandb": "it belongs to a platform whose package is not public",
    "rl_insight": "it has no public package",
}
"""Loggers that verl has and Caldera has not."""


def check_loggers(names: Sequence[str]) -> None:
    """Every name is that of a logger whose package is installed."""
    for name in names:
        if reason := REFUSED.get(name):
            known = ", ".join(LOGGERS)
            raise UnsupportedError(f"trainer.logger={name!r}: {reason}; takes {known}")
        _ = LOGGERS[name]  # an unknown one raises, and lists the known ones
        require_package("trainer.logger", name)


class Tracking:
    """Logs to one or more back ends (`trainer.logger`), named as in `LOGGERS`.

    `console_metrics` is what the console shows (`trainer.console_metrics`); by default it is short
    where another back end keeps the rest. With `resume_step`, back ends that keep rows drop those
    of later steps first. A back end that fails is logged once, and its losses are counted in
    `tracking/lost_rows`; the others go on.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: dict[str, Any] | None = None,
        run_dir: Path = Path("."),
        resume_step: int = 0,
        console_metrics: Sequence[str] | None = None,
    ) -> None:
        given = [default_backend] if isinstance(default_backend, str) else default_backend
        names = list(dict.fromkeys(given))
        shown = console_metrics or ((ALL,) if names == ["console"] else (SHORT,))
        run = LoggedRun(project_name, experiment_name, config, Path(run_dir), resume_step, shown)
        check_loggers(names)  # all of them, before the first one opens anything
        with ExitStack() as opened:
            self._loggers: list[PromptLogger | BackgroundLogger] = []
            for name in names:
                kind = PromptLogger if name in PROMPT else BackgroundLogger
                self._loggers.append(kind(name, partial(LOGGERS[name], run)))
                opened.callback(self._loggers[-1].finish)
            self._opened = opened.pop_all()

    def log(self, data: Mapping[str, SupportsFloat], step: int) -> None:
        """Send one row of metrics to every back end."""
        row = {name: _plain_number(value) for name, value in data.items()}
        if lost := self.lost_rows:
            row["tracking/lost_rows"] = lost
        for logger in self._loggers:
            logger.log(row, step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        """Show validation responses in every back end."""
        for logger in self._loggers if samples else ():
            logger.log_generations(samples, step)

    @property
    def lost_rows(self) -> int:
        """Rows and tables that back ends have lost so far."""
        return sum(logger.losses.count for logger in self._loggers)

    def finish(self) -> None:
        """Close every back end; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()


def _plain_number(value: SupportsFloat) -> float:
    """Numpy scalars and tensors of one element become Python numbers; integers stay integers."""
    plain = value.item() if hasattr(value, "item") else value
    return plain if isinstance(plain, int | float) else float(plain)
