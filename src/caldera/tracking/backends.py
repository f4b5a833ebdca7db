"""Loggers of other libraries, each of which is imported when it is opened."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.tracking.loggers import GENERATION_COLUMNS, GENERATIONS, LOGGERS, Generation, LoggedRun

OF_THE_EXTRA = ("wandb", "tensorboard", "trackio")
"""Loggers whose package the extra `tracking` brings."""
BY_THEMSELVES = ("mlflow", "swanlab", "clearml")
"""Those whose package is installed by itself. All have the name of their package."""


def require_package(key: str, logger: str) -> None:
    """Raise unless the package of a logger, which `key` names, is installed."""
    if logger in (*OF_THE_EXTRA, *BY_THEMSELVES) and find_spec(logger) is None:
        is_extra = logger in OF_THE_EXTRA
        command = install_command("tracking") if is_extra else f"pip install {logger}"
        raise ConfigError(f"{key}={logger!r} needs the package {logger}: {command}")


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
"""ClearML's binding, which looks for a repository in a thread, which at times never ends."""


@LOGGERS.register("clearml")
class ClearmlLogger:
    """A task; a metric a/b/c is the series c of the plot a/b."""

    def __init__(self, run: LoggedRun) -> None:
        from clearml import Task

        # Caldera's metrics are all that there is: streams, frameworks and arguments stay alone.
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


DEFAULT_URI = "sqlite:////tmp/mlruns.db"
GENERATIONS_FILE = "val_generations.json"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or a file of this machine."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def experiment_id(client: Any, name: str) -> str:
    """The experiment of this name, which is made where there is none."""
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


@LOGGERS.register("mlflow")
class MlflowLogger:
    """A run of the experiment PROJECT; MLFLOW_RUN_ID names one to go on with."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri())
        self._run_id = os.environ.get("MLFLOW_RUN_ID") or self._create(run)
        if run.config is not None:
            self._client.log_dict(self._run_id, run.config, "config.json")

    def _create(self, run: LoggedRun) -> str:
        experiment = experiment_id(self._client, run.project_name)
        created = self._client.create_run(experiment, run_name=run.experiment_name)
        return str(created.info.run_id)

    def log(self, data: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_allowed(name), float(value), now, step) for name, value in data.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [(step, *sample) for sample in samples]
        columns = dict(zip(GENERATION_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        self._client.log_table(self._run_id, columns, GENERATIONS_FILE)  # adds to what is there

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _allowed(name: str) -> str:
    """MLflow knows no @ in a name, nor most other signs."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


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


@LOGGERS.register("tensorboard")
class TensorboardLogger:
    """Files in TENSORBOARD_DIR, or else in tensorboard_log/PROJECT/EXPERIMENT."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        given = os.environ.get("TENSORBOARD_DIR")
        folder = Path(given or Path("tensorboard_log", run.project_name, run.experiment_name))
        folder.mkdir(parents=True, exist_ok=True)
        # Steps that a resumed run logs again are hidden in what an earlier process wrote.
        purge = run.resume_step + 1 if run.resume_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if run.config is not None:
            text = json.dumps(run.config, indent=2, default=str)
            self._writer.add_text("config", f"```\n{text}\n```", run.resume_step)

    def log(self, data: dict[str, float], step: int) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [GENERATION_COLUMNS, ("---",) * len(GENERATION_COLUMNS)]
        cells = [[str(step), *map(str, sample)] for sample in samples]
        rows += [tuple(_cell(text) for text in row) for row in cells]
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        self._writer.add_text(GENERATIONS, table, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    """Text that stays in its cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")


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
