"""SwanLab."""

from __future__ import annotations

import os
from collections.abc import Sequence

from caldera.tracking.loggers import GENERATION_COLUMNS, GENERATIONS, LOGGERS, Generation, LoggedRun


@LOGGERS.register("swanlab")
class SwanlabLogger:
    """SWANLAB_API_KEY logs in, SWANLAB_LOG_DIR and SWANLAB_MODE say where to and how."""

    def __init__(self, run: LoggedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        if key := os.environ.get("SWANLAB_API_KEY"):
            swanlab.login(api_key=key)
        mode = os.environ.get("SWANLAB_MODE") or "cloud"
        swanlab.init(
            project=run.project_name,
            name=run.experiment_name,
            config=run.config,
            log_dir=os.environ.get("SWANLAB_LOG_DIR") or "swanlog",
            mode="online" if mode == "cloud" else mode,  # its older name
        )

    def log(self, data: dict[str, float], step: int) -> None:
        self._swanlab.log(data, step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(GENERATION_COLUMNS), [[step, *sample] for sample in samples])
        self._swanlab.log({GENERATIONS: table}, step=step)

    def finish(self) -> None:
        self._swanlab.finish()
