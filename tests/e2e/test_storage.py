"""Runs whose data, model and checkpoints live elsewhere."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.conftest import Lab

STEPS = 4
SAMPLES_PER_STEP = 5 * 4

# Ends the run in the third step of the first process that has this file.
SCORER = f"""
from pathlib import Path

from caldera.errors import DataError

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info, mark):
    global calls
    calls += 1
    if mark and calls > {2 * SAMPLES_PER_STEP} and not Path(mark).exists():
        Path(mark).touch()
        raise DataError("the machine is going down")
    return float(solution_str == ground_truth)
"""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def site(lab: Lab) -> Iterator[str]:
    """The address of a web server that holds the lab's files."""
    handler = partial(QuietHandler, directory=str(lab.folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def overrides(lab: Lab, run_dir: Path, *more: str, mark: str = "") -> list[str]:
    return lab.overrides(
        run_dir,
        "data.train_batch_size=5",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"custom_reward_function.reward_kwargs.mark={mark}",
        "reward.streaming=False",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        *more,
    )


def metrics(lab: Lab, run_dir: Path) -> list[dict[str, Any]]:
    """Without what a clock measured, and without what only a run with copies has."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_", "perf/", "checkpoint/"))}
        for row in lab.metrics(run_dir)
    ]


def test_a_run_that_has_everything_elsewhere_goes_on_on_another_machine(
    lab: Lab, site: str, tmp_path: Path
) -> None:
    (lab.folder / "score.py").write_text(SCORER)
    plain = tmp_path / "plain"
    done = lab.run(overrides(lab, plain, f"custom_reward_function.path={lab.folder}/score.py"))
    assert done.returncode == 0, done.stderr

    remote, mark = tmp_path / "remote", tmp_path / "mark"
    elsewhere = (
        f"data.train_files={site}/train.parquet",
        f"data.val_files={site}/test.parquet",
        f"actor_rollout_ref.model.path={site}/model",
        f"custom_reward_function.path={site}/score.py",
        f"trainer.default_hdfs_dir=file://{remote}",
        "trainer.max_actor_ckpt_to_keep=1",
    )

    def start(machine: str) -> Any:
        cache = {"CALDERA_CACHE": str(tmp_path / machine / "cache"), "no_proxy": "127.0.0.1"}
        own = replace(lab, environment=lab.environment | cache)
        run_dir = tmp_path / machine / "run"
        return own.run(overrides(lab, run_dir, *elsewhere, mark=str(mark)))

    failed = start("first")
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert "the machine is going down" in failed.stderr
    assert (remote / "latest_checkpointed_iteration.txt").read_text() == "2"
    shutil.rmtree(tmp_path / "first")

    resumed = start("second")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert metrics(lab, tmp_path / "second/run") == metrics(lab, plain)[2:]
    assert sorted(path.name for path in remote.iterdir()) == [
        f"global_step_{STEPS}",
        "latest_checkpointed_iteration.txt",
    ]
    weights = "actor/huggingface/model.safetensors"
    ours, theirs = (folder / f"global_step_{STEPS}" for folder in (remote, plain))
    assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
    assert torch.load(ours / "data.pt") == torch.load(theirs / "data.pt")
