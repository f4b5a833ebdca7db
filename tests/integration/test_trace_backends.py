"""Traces with the real libraries, without a server; those that are not installed are skipped.

`make tracking` installs trackio.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

from caldera.tracking.traces import GENERATION, Span, Trace, TracedRun, TraceWriter

if TYPE_CHECKING:
    from tests.conftest import Lab

REPOSITORY = Path(__file__).parents[2]
TALK = """
interaction:
- name: examiner
  class_name: caldera.interactions.scripted.ScriptedInteraction
  config: {turns: [{say: "1+1", expect: "[0-9]", score: 0.5}, {say: "", expect: "2", score: 1.0}]}
"""
RUN = TracedRun("project", "experiment", 0)


def trace() -> Trace:
    sampled = {"token_ids": [3], "weight_version": 2, "log_prob_mean": -0.5}
    spans = [
        Span("generate", GENERATION, 1000.0, 1.0, {"token_ids": [1, 2]}, sampled),
        Span("add", "tool", 1001.0, 0.5, {"arguments": '{"a": 1}'}, {"status": "ok"}),
    ]
    messages = [{"role": "user", "content": "1+1="}]
    return Trace(
        "tool_agent", 4, 1000.0, 1.5, {"messages": messages}, {"reward": 1.0}, {"uid": "u"}, spans
    )


@pytest.mark.filterwarnings("ignore")  # MLflow takes its own warnings, as errors, for failures
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "")  # put back in the end
    writer = TraceWriter("mlflow", RUN, str)
    writer.write([trace(), trace()])
    writer.finish()
    assert writer.losses.count == 0
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("project")
    found = client.search_traces(locations=[experiment.experiment_id])
    assert len(found) == 2
    assert found[0].info.tags["step"] == "4" and found[0].info.tags["uid"] == "u"
    assert found[0].info.trace_metadata["mlflow.trace.session"] == "experiment"
    whole, generation, tool = sorted(found[0].data.spans, key=lambda span: span.start_time_ns)
    assert whole.name == "tool_agent" and whole.outputs == {"reward": 1.0}
    assert generation.inputs == {"token_ids": [1, 2], "text": "[1, 2]"}
    assert generation.outputs["weight_version"] == 2
    assert (tool.name, tool.span_type, tool.outputs) == ("add", "TOOL", {"status": "ok"})
    assert tool.end_time_ns - tool.start_time_ns == 500_000_000


@pytest.mark.filterwarnings("ignore")  # as above
def test_mlflow_that_cannot_be_reached_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "")
    writer = TraceWriter("mlflow", RUN, None)
    writer.write([trace(), trace()])
    writer.finish()
    assert writer.losses.count == 3  # the opening, and two traces


def test_trackio_beside_its_logger(tmp_path: Path) -> None:
    """In a process of its own, as Trackio reads its settings once."""
    pytest.importorskip("trackio")
    script = """
import json
from pathlib import Path
from test_trace_backends import RUN, trace
from caldera.tracking import Tracking
from caldera.tracking.traces import TraceWriter
with Tracking("project", "experiment", ["trackio", "file"], None, Path("run")) as tracking:
    writer = TraceWriter("trackio", RUN, str)
    writer.write([trace(), trace()])
    tracking.log({"x": 1.0}, 1)
    writer.finish()
    tracking.log({"x": 2.0}, 2)
from trackio.sqlite_storage import SQLiteStorage
lost = writer.losses.count + tracking.lost_rows
rows = [row["x"] for row in SQLiteStorage.get_logs("project", "experiment")]
found = SQLiteStorage.get_traces("project", "experiment-traces-0")
print(json.dumps([lost, rows, found]))
"""
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True, timeout=120, text=True, capture_output=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "TRACKIO_DIR": str(tmp_path / "trackio")},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    lost, rows, found = json.loads(line)
    assert lost == 0 and rows == [1.0, 2.0] and len(found) == 2
    assert found[0]["messages"] == [{"role": "user", "content": "1+1="}]
    assert found[0]["metadata"]["reward"] == 1.0 and found[0]["metadata"]["uid"] == "u"
    generation, tool = found[0]["spans"]
    assert generation["output"]["weight_version"] == 2
    assert generation["input"] == {"token_ids": [1, 2], "text": "[1, 2]"}
    assert (tool["kind"], tool["duration_ms"], tool["output"]) == ("tool", 500.0, {"status": "ok"})


def stored(project: str, run: str) -> list[dict[str, Any]]:
    """The traces that Trackio has."""
    script = f"""
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_traces({project!r}, {run!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, text=True, capture_output=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(300)  # two processes start, and the model is warmed up first
def test_both_processes_of_a_run_with_agents_are_traced(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setitem(lab.environment, "TRACKIO_DIR", str(tmp_path / "trackio"))
    rows = pyarrow.parquet.read_table(lab.train_file).to_pylist()
    for row in rows:
        row["agent_name"] = "tool_agent"
        row["extra_info"]["interaction_kwargs"] = {"name": "examiner"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "talks.parquet")
    (tmp_path / "talk.yaml").write_text(TALK)
    rollout = "actor_rollout_ref.rollout"
    lab.train(
        tmp_path / "run", f"data.train_files={tmp_path / 'talks.parquet'}",
        f"data.val_files={tmp_path / 'talks.parquet'}", "data.max_response_length=12",
        f"{rollout}.multi_turn.interaction_config_path={tmp_path / 'talk.yaml'}",
        f"{rollout}.trace.backend=trackio", f"{rollout}.trace.project_name=p",
        f"{rollout}.trace.experiment_name=e", f"{rollout}.trace.max_samples_per_step_per_worker=3",
        "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.test_freq=-1",
    )  # fmt: skip
    seeds = set()
    for rank in range(2):
        found = stored("p", f"e-traces-{rank}")
        # In which order trackio tells them, newest first or not, is its own affair.
        assert sorted(each["step"] for each in found) == [1] * 3 + [2] * 3
        for each in found:
            seeds.add(each["metadata"]["sample_seed"])
            kinds = [span["name"] for span in each["spans"]]
            assert kinds == ["generate", "user"] * 2
            first, _, second, _ = each["spans"]
            prompt = first["input"]["token_ids"] + first["output"]["token_ids"]
            assert second["input"]["token_ids"][: len(prompt)] == prompt
            assert second["output"]["weight_version"] == first["output"]["weight_version"]
            assert "reward" in each["metadata"]
    assert len(seeds) == 12
