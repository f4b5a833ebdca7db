"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from caldera.tracking.loggers import GENERATION_COLUMNS, GENERATIONS, LOGGERS, Generation, LoggedRun


@LOGGERS.register("wandb")
class WandbLogger:
    """A run of WANDB_ENTITY's project; `WANDB_MODE=offline` keeps it on disk."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._table = wandb.Table
        proxy = (run.config or {}).get("trainer", {}).get("wandb_proxy")
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            entity=os.environ.get("WANDB_ENTITY"),
            config=run.config,
            settings=wandb.Settings(https_proxy=proxy) if proxy else None,
        )

    def log(self, data: dict[str, float], step: int) -> None:
        self._run.log(data, step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows: list[Any] = [[step, *sample] for sample in samples]
        table = self._table(columns=list(GENERATION_COLUMNS), data=rows)
        self._run.log({GENERATIONS: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
