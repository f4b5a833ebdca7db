"""GRPO whose answers vLLM samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine_trials import (
    assert_trains_an_adapter,
    assert_trains_on_two_ranks,
    python_of,
    small_model,
)

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.slow


def test_two_steps(lab: Lab, tmp_path: Path) -> None:
    """After the first, vLLM samples with the weights that the first has made."""
    rows = lab.train(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={small_model(lab, tmp_path / 'model')}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.engine_python={python_of('vllm')}",
        "trainer.total_training_steps=2",
    )
    assert [row["training/global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert row["actor/grad_norm"] > 0


def test_an_engine_over_the_devices_of_two_ranks(lab: Lab, tmp_path: Path) -> None:
    assert_trains_on_two_ranks(lab, tmp_path, "vllm")


def test_an_adapter_on_two_devices(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trainer process, and an engine of two."""
    assert_trains_an_adapter(
        lab, tmp_path, monkeypatch, "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.engine_python={python_of('vllm')}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )  # fmt: skip
