"""Runs whose ranks sample together: the numbers of one process, and a rank that is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from caldera.errors import WorkerError
from caldera.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from tests.integration.sampling_workers import Sampling

if TYPE_CHECKING:
    from tests.conftest import Lab

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TOGETHER = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2")


@pytest.mark.timeout(300)
def test_two_ranks_that_sample_together(lab: Lab, tmp_path: Path) -> None:
    """As batches, and for agent loops; from sharded weights, and from whole ones."""
    steps = ("trainer.total_training_steps=2", f"{ROLLOUT}.n=4", *lab.descent)
    alone = lab.train(tmp_path / "one", *steps, "trainer.test_freq=2")
    batches = lab.train(
        tmp_path / "batches", *steps, *TOGETHER, "trainer.test_freq=2", f"{ACTOR}.strategy=fsdp2"
    )
    lab.assert_same(batches, alone)
    held_out = [key for key in alone[-1] if key.startswith("val-core/")]
    assert held_out
    assert [batches[-1][key] for key in held_out] == [alone[-1][key] for key in held_out]
    agents = lab.train(
        tmp_path / "agents", *steps, *TOGETHER, f"{ACTOR}.strategy=local",
        f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.free_cache_engine=False",
    )  # fmt: skip
    lab.assert_same(agents, alone)
    assert agents[0]["num_turns/mean"] == 2


@pytest.mark.parametrize(
    ("fate", "told"),
    [("killed", "its process was killed by SIGKILL"), ("raises", "ValueError: no third step")],
)
def test_a_rank_is_lost(tmp_path: Path, fate: str, told: str) -> None:
    group = LocalWorkerGroup(
        ResourcePool([2]), ClassWithInitArgs(Sampling), "samplers", log_dir=tmp_path
    )
    with pytest.raises(WorkerError) as raised:
        group.sample(fate)
    first, what = str(raised.value).splitlines()[:2]
    assert first == "worker group samplers: rank 1 of 2 failed in sample"
    assert what.strip().startswith(told)
