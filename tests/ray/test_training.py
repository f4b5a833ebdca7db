"""Whole runs from the command line on a Ray cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.ray
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")


def test_two_ranks_of_a_cluster_do_the_same_as_one_process(
    cluster: Any, lab: Lab, tmp_path: Path
) -> None:
    steps = "trainer.total_training_steps=2"
    alone = lab.train(tmp_path / "local", steps)
    on_ray = replace(lab, environment=lab.environment | {"RAY_ADDRESS": cluster.address})
    arguments = lab.overrides(
        tmp_path / "ray", steps, "trainer.n_gpus_per_node=2", "trainer.logger=[console,file]",
        "trainer.save_freq=2",
    )  # fmt: skip
    done = on_ray.run(arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    both = on_ray.metrics(tmp_path / "ray")
    assert len(both) == len(alone) == 2
    for one, other in zip(both, alone, strict=True):
        for key in COMPARED:
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
    assert "step:2" in done.stdout  # the driver's console reaches the terminal
    assert (tmp_path / "ray/global_step_2/actor").is_dir()
