"""A whole run in exact mode: sampler and trainer never disagree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Lab


def test_sampler_and_trainer_agree_to_the_bit_at_every_step(lab: Lab, tmp_path: Path) -> None:
    rows = lab.train(
        tmp_path,
        "actor_rollout_ref.rollout.native.exact=True",
        "actor_rollout_ref.rollout.enable_prefix_caching=True",
        "actor_rollout_ref.rollout.enable_chunked_prefill=True",
        "actor_rollout_ref.rollout.max_num_batched_tokens=100",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=7",
        "trainer.total_training_steps=3",
    )
    assert len(rows) == 3
    for row in rows:
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["actor/grad_norm"] > 0
