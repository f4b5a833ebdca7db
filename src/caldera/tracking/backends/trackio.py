"""Trackio, which keeps runs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caldera.tracking.loggers import GENERATION_COLUMNS, GENERATIONS, LOGGERS, Generation, LoggedRun


@LOGGERS.register("trackio")
class TrackioLogger:
    """Files of TRACKIO_DIR, which `trackio show` draws."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._table = trackio.Table
        self._run: Any = trackio.init(
            project=run.project_name, name=run.experiment_name, config=run.config, embed=False
        )

    def log(self, data: dict[str, float], step: int) -> None:
        self._run.log(data, step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [[step, *sample] for sample in samples]
        table = self._table(columns=list(GENERATION_COLUMNS), data=rows)
        self._run.log({GENERATIONS: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
