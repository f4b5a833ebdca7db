"""verl's documented line of GRPO with an asynchronous vLLM, and sharded parameters on the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine_trials import python_of
from tests.verl_lines import GRPO_WITH_VLLM, START, bash, metrics, talkative_model

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.slow
pytest.importorskip("wandb", reason="`make vllm` installs it")


def test_grpo(lab: Lab, tmp_path: Path) -> None:
    variables = talkative_model(tmp_path)
    (tmp_path / "val.parquet").symlink_to("test.parquet")
    done = bash(
        lab, tmp_path, f"{START} {GRPO_WITH_VLLM}", "data.train_batch_size=4",
        "data.max_prompt_length=4", "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.rollout.engine_python={python_of('vllm')}",
        # Those after the line's top_p are not the trainer's.
        "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
        "trainer.console_metrics=all", "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        **variables,
    )  # fmt: skip
    for step in (1, 2):
        assert metrics(done, step)["training/rollout_probs_diff_max"] < 1e-2
    assert metrics(done)["response_length/mean"] > 1
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"actor/grad_norm" in run.read_bytes()
