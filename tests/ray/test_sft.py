"""Supervised fine-tuning on a Ray cluster has the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from caldera.config import SFTTrainerConfig, load_supervised_config
from caldera.trainer.sft import run
from caldera.workers.supervised import FINE_TUNING

if TYPE_CHECKING:
    from tests.conftest import Lessons
    from tests.ray.conftest import RealNodes

pytestmark = pytest.mark.ray
MORE = ("trainer.total_training_steps=4", "trainer.test_freq=2", "trainer.save_freq=4")


def test_conversations_over_two_nodes(
    lessons: Lessons, nodes: RealNodes, tmp_path: Path, wait_for: Any
) -> None:
    given = (*lessons.conversations, *MORE)
    overrides = lessons.overrides(tmp_path / "alone", *given)
    run(load_supervised_config(overrides, "sft_trainer_engine", None, SFTTrainerConfig),
        FINE_TUNING)  # fmt: skip
    folder = tmp_path / "ray"
    done = lessons.run(
        ["caldera.trainer.sft_trainer_ray"],
        lessons.overrides(folder, *given, "trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
        RAY_ADDRESS=nodes.address,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected, found = lessons.lab.metrics(tmp_path / "alone"), lessons.lab.metrics(folder)
    assert [values(row) for row in found] == [
        pytest.approx(values(row), rel=1e-5, abs=1e-5) for row in expected
    ]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    wait_for(lambda: nodes.processes_of_runs() == {}, "orphans")


def values(row: dict[str, Any]) -> dict[str, Any]:
    names = ("step", "train/loss", "train/lr", "train/tokens", "val/loss")
    return {name: row[name] for name in names if name in row}
