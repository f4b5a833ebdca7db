"""ClearML."""

from __future__ import annotations

from collections.abc import Sequence

from caldera.tracking.loggers import GENERATION_COLUMNS, GENERATIONS, LOGGERS, Generation, LoggedRun

CONNECTED = (
    "artifacts",
    "matplotlib",
    "tensorflow",
    "tensorboard",
    "pytorch",
    "xgboost",
    "scikit",
    "fastai",
    "lightgbm",
    "hydra",
    "detect_repository",
    "tfdefines",
    "joblib",
    "megengine",
    "catboost",
    "gradio",
    "jsonargparse",
)
"""What ClearML hooks into. It looks for a repository in a thread, which at times never ends."""


@LOGGERS.register("clearml")
class ClearmlLogger:
    """A task; a metric a/b/c is the series c of the plot a/b."""

    def __init__(self, run: LoggedRun) -> None:
        from clearml import Task

        # What Caldera logs is all that there is: streams, frameworks and arguments stay alone.
        self._task = Task.init(
            project_name=run.project_name,
            task_name=run.experiment_name,
            reuse_last_task_id=False,
            continue_last_task=False,
            output_uri=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(CONNECTED, False),
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        if run.config is not None:
            self._task.connect_configuration(run.config, name="config")
        self._logger = self._task.get_logger()

    def log(self, data: dict[str, float], step: int) -> None:
        for name, value in data.items():
            title, _, series = name.rpartition("/")
            self._logger.report_scalar(title or name, series, value, step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [list(GENERATION_COLUMNS), *([step, *sample] for sample in samples)]
        self._logger.report_table(GENERATIONS, "answers", step, table_plot=rows)

    def finish(self) -> None:
        self._task.close()
