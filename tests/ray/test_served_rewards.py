"""A run on a Ray cluster whose reward model stands behind servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.ray


def test_a_model_with_ranks_of_its_own(
    lab: Lab, cluster: Any, tmp_path: Path, reward_model: tuple[str, ...]
) -> None:
    served = (*reward_model, "reward_model.rollout.name=native", "trainer.total_training_steps=2")
    expected = lab.train(tmp_path / "here", *served)
    away = replace(lab, environment=lab.environment | {"RAY_ADDRESS": cluster.address})
    found = away.train(
        tmp_path / "ray", *served, "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=2", "reward_model.nnodes=1", "trainer.worker_group=ray",
    )  # fmt: skip
    lab.assert_same(found, expected)
    assert [row["reward/failed"] for row in found] == [0, 0]
