"""`caldera generate` on a Ray cluster gives the answers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab
    from tests.ray.conftest import RealNodes

pytestmark = pytest.mark.ray


def test_answers_of_two_nodes(lab: Lab, nodes: RealNodes, tmp_path: Path, wait_for: Any) -> None:
    def answers(name: str, *more: str, **environment: str) -> list[list[str]]:
        keys = (
            f"model.path={lab.model}", f"data.path={lab.test_file}", "data.n_samples=2",
            f"data.output_path={tmp_path / name}", "data.batch_size=16", "rollout.prompt_length=8",
            "rollout.response_length=4", "trainer.device=cpu", *more,
        )  # fmt: skip
        done = lab.run(["generate", *keys], "caldera.cli", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        found: list[list[str]] = pyarrow.parquet.read_table(tmp_path / name)[
            "responses"
        ].to_pylist()
        return found

    expected = answers("alone.parquet", "trainer.worker_group=local")
    spread = answers(
        "ray.parquet", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", RAY_ADDRESS=nodes.address
    )
    assert spread == expected
    assert not (tmp_path / "ray.parquet.parts").exists()
    wait_for(lambda: nodes.processes_of_runs() == {}, "orphans")
