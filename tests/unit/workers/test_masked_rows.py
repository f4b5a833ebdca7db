"""A row without a response mask is in no loss: updates are as if it had not been sampled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from caldera.protocol import DataProto, tensors_of

Make = Callable[..., Any]
Advantages = Callable[[DataProto], DataProto]
ACTOR = "actor_rollout_ref.actor"
MASKED = 3
FIVE_ROWS = (
    "data.train_batch_size=5", "actor_rollout_ref.rollout.n=1", f"{ACTOR}.ppo_mini_batch_size=5",
    "critic.ppo_mini_batch_size=5",
)  # fmt: skip
# A micro-batch a row: a pass over other rows could round differently.
ROW_BY_ROW = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1")


def masked(batch: DataProto) -> DataProto:
    tensors = tensors_of(batch)
    for key in ("response_mask", "advantages", "returns"):
        tensors[key][MASKED] = 0
    return batch


def without_masked(batch: DataProto) -> DataProto:
    return batch.select_idxs([row for row in range(len(batch)) if row != MASKED])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_policy_learns_nothing_from_it(
    policy: Make, prompts: DataProto, advantages: Advantages, mode: str
) -> None:
    options = (
        *ROW_BY_ROW, f"{ACTOR}.loss_agg_mode={mode}", f"{ACTOR}.entropy_coeff=0.1",
        f"{ACTOR}.use_kl_loss=True",
    )  # fmt: skip
    ours, theirs = policy(*options), policy(*options, *FIVE_ROWS)
    batch = ours.generate_sequences(copy.deepcopy(prompts))
    batch = batch.union(DataProto(ours.compute_log_prob(batch).batch))
    batch = advantages(batch.union(ours.compute_ref_log_prob(batch)))
    other = without_masked(copy.deepcopy(batch))
    metrics = ours.update_actor(masked(batch)).meta_info["metrics"]
    expected = theirs.update_actor(other).meta_info["metrics"]
    for key in ("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss", "actor/grad_norm"):
        assert metrics[key] == expected[key], key
    after, wanted = weights(ours.workers[0].actor), weights(theirs.workers[0].actor)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)


def test_the_critic_learns_nothing_from_it(
    policy: Make, critic: Make, prompts: DataProto, advantages: Advantages
) -> None:
    ours, theirs = critic(*ROW_BY_ROW), critic(*ROW_BY_ROW, *FIVE_ROWS)
    batch = advantages(policy().generate_sequences(prompts))
    batch = batch.union(ours.compute_values(batch))
    other = without_masked(copy.deepcopy(batch))
    metrics = ours.update_critic(masked(batch)).meta_info["metrics"]
    expected = theirs.update_critic(other).meta_info["metrics"]
    for key in ("critic/vf_loss", "critic/grad_norm", "critic/vpred_mean"):
        assert metrics[key] == expected[key], key
    after, wanted = weights(ours.workers[0].engine), weights(theirs.workers[0].engine)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
