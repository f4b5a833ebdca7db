"""Each logger with its real library, without a server; those that are not installed are skipped.

`make tracking` installs wandb, tensorboard and trackio.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caldera.tracking import Tracking

REPOSITORY = Path(__file__).parents[2]
ROW = {"actor/entropy": 0.25, "val-core/gsm8k/acc/mean@1": 0.5}
SAMPLES = [("1+1=", "2 | two\nlines", 1.0), ("2+2=", "5", 0.0)]
CONFIG = {"trainer": {"total_epochs": 3, "wandb_proxy": None}}


def log_to(name: str, folder: Path) -> None:
    """Two rows and a table; nothing is lost."""
    with Tracking("project", "experiment", [name, "file"], CONFIG, folder / "run") as tracking:
        tracking.log(ROW, 1)
        tracking.log_generations(SAMPLES, 1)
        tracking.log({"actor/entropy": 0.125}, 2)
    assert tracking.lost_rows == 0


def log_in_a_process(name: str) -> subprocess.CompletedProcess[str]:
    """The same for libraries that read their settings once in a process; prints what is lost."""
    script = f"""
from pathlib import Path
from caldera.tracking import Tracking
with Tracking("project", "experiment", [{name!r}, "file"], {CONFIG!r}, Path("run")) as tracking:
    tracking.log({ROW!r}, 1)
    tracking.log_generations({SAMPLES!r}, 1)
    tracking.log({{"actor/entropy": 0.125}}, 2)
print("lost", tracking.lost_rows)
"""
    return subprocess.run(
        [sys.executable, "-c", script],
        check=True, timeout=120, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_wandb_offline(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_to("wandb", here)
    (run,) = (here / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # a process of wandb's writes it, and may outlive the run
    while b"actor/entropy" not in run.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    data = run.read_bytes()
    for text in (b"actor/entropy", b"mean@1", b"total_epochs", b"team", b"experiment"):
        assert text in data
    (table,) = (here / "wandb").rglob("*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "input", "output", "score"]
    assert content["data"] == [[1, *sample] for sample in SAMPLES]


def test_wandb_without_an_account_stops_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HOME", str(here))
    done = log_in_a_process("wandb")
    assert "trainer.logger: wandb has failed" in done.stderr
    assert done.stdout.endswith("lost 4\n")  # the opening, and what was logged
    rows = (here / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("given", ["", "chosen"])
def test_tensorboard(here: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", given)
    log_to("tensorboard", here)
    events = EventAccumulator(given or "tensorboard_log/project/experiment")
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/entropy")] == [(1, 0.25), (2, 0.125)]
    (table,) = events.Tensors("val/generations/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == r"| 1 | 1+1= | 2 \| two<br>lines | 1.0 |"


def test_trackio(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(here / "trackio"))
    assert log_in_a_process("trackio").stdout.endswith("lost 0\n")
    written = b"".join(
        path.read_bytes() for path in (here / "trackio").rglob("*") if path.is_file()
    )
    for text in (b"actor/entropy", b"experiment", b"two"):
        assert text in written


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow itself calls
def test_mlflow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here}/mlflow.db")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    log_to("mlflow", here)
    client = mlflow.MlflowClient(f"sqlite:///{here}/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "experiment" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "actor/entropy")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.125)]
    assert run.data.metrics["val-core/gsm8k/acc/mean_at_1"] == 0.5
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    log_to("mlflow", here)  # goes on with the same run
    assert len(client.search_runs([experiment.experiment_id])) == 1
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "val_generations.json"} <= artifacts


def test_swanlab(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(here / "swan"))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    log_to("swanlab", here)
    written = b"".join(path.read_bytes() for path in (here / "swan").rglob("*") if path.is_file())
    for text in (b"actor/entropy", b"val/generations"):
        assert text in written


def test_clearml(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("clearml")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(here / "clearml"))
    assert log_in_a_process("clearml").stdout.endswith("lost 0\n")
    (archive,) = (here / "clearml").rglob("*.zip")
    assert archive.stat().st_size > 0
