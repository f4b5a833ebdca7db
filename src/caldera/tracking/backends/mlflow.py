"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Any

from caldera.tracking.loggers import GENERATION_COLUMNS, LOGGERS, Generation, LoggedRun

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
