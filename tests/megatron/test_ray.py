"""strategy=megatron on Ray's workers: a model in four parts learns its task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

pytest.importorskip("megatron.core")
pytest.importorskip("ray")
pytestmark = [pytest.mark.megatron, pytest.mark.ray]

ACTOR = "actor_rollout_ref.actor"
ACCURACY = "val-core/caldera/arithmetic/acc/mean@16"


def test_a_model_in_four_parts_learns(lab: Lab, tmp_path: Path) -> None:
    """Two stages, each of matrices that two ranks share, on a cluster of the run's own."""
    rows = lab.train(
        tmp_path,
        "trainer.worker_group=ray",
        "+ray_kwargs.ray_init={address: local, num_cpus: 5, include_dashboard: false}",
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=16",
        "trainer.val_before_train=True",
        "trainer.test_freq=1000000",  # after the last step
        "trainer.total_training_steps=25",
    )
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    assert len(accuracies) == 2
    assert accuracies[0] < 0.5
    assert accuracies[1] > accuracies[0] + 0.06  # after 40 steps it was 0.66, from 0.34
