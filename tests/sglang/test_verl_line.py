"""verl's documented line of tools, with SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine_trials import python_of
from tests.verl_lines import (
    BEFORE,
    START,
    TOOLS,
    bash,
    metrics,
    talkative_model,
    tools_of_verls,
)

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.slow


def test_tools(lab: Lab, tmp_path: Path) -> None:
    variables = talkative_model(tmp_path)
    with tools_of_verls(tmp_path):
        done = bash(
            lab, tmp_path, f"{START} {' '.join(BEFORE)} {TOOLS}",
            "actor_rollout_ref.rollout.name=sglang", "data.max_response_length=32",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
            "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.val_kwargs.n=2",
            f"actor_rollout_ref.rollout.engine_python={python_of('sglang')}",
            "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1",
            f"trainer.default_local_dir={tmp_path / 'run'}", **variables,
        )  # fmt: skip
    told = metrics(done)
    assert told["tool_calls/code_interpreter/ok"] > 0 and told["num_turns/max"] > 3
    assert told["training/rollout_probs_diff_max"] < 1e-2
