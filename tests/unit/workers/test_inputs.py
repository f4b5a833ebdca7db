"""What the methods say they need of a batch is all that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from caldera.protocol import DataProto
from caldera.single_controller import WorkerGroup
from caldera.single_controller.decorator import registration_of

Group = Callable[..., WorkerGroup]
KL_LOSS = "actor_rollout_ref.actor.use_kl_loss=True"


def call_with_needs(group: Any, method: str, batch: DataProto) -> DataProto:
    """A method's answer to the part of the batch that another process would be sent."""
    registered = registration_of(getattr(type(group.workers[0]), method))
    assert registered is not None
    assert registered.needs is not None
    tensors = [key for key in registered.needs if key in batch.batch.keys()]  # noqa: SIM118
    columns = [key for key in registered.needs if key in batch.non_tensor_batch]
    part = batch.select(tensors, columns)
    assert len(part.batch.keys()) < len(batch.batch.keys()), "something is left out"
    answer: DataProto = getattr(group, method)(part)
    return answer


def assert_equal(one: DataProto, two: DataProto) -> None:
    assert set(one.batch.keys()) == set(two.batch.keys())
    tensors: Any = one.batch
    assert all(torch.equal(value, two.batch[key]) for key, value in tensors.items())


def metrics_of(answer: DataProto) -> dict[str, Any]:
    metrics: dict[str, Any] = answer.meta_info["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_the_policy(
    policy: Group, prompts: DataProto, advantages: Callable[[DataProto], DataProto]
) -> None:
    one, two = policy(KL_LOSS), policy(KL_LOSS)
    batch = one.generate_sequences(prompts)
    assert_equal(batch, call_with_needs(two, "generate_sequences", prompts))
    for method in ("compute_log_prob", "compute_ref_log_prob"):
        answer = getattr(one, method)(batch)
        assert_equal(answer, call_with_needs(two, method, batch))
        batch.union(DataProto(answer.batch))
    advantages(batch)
    batch.batch["old_log_probs"] += 0.1
    batch.batch["rollout_is_weights"] = torch.full_like(batch.batch["old_log_probs"], 0.5)
    expected = metrics_of(one.update_actor(batch))
    assert metrics_of(call_with_needs(two, "update_actor", batch)) == expected


def test_the_critic(
    policy: Group, critic: Group, prompts: DataProto, advantages: Callable[[DataProto], DataProto]
) -> None:
    batch = advantages(policy().generate_sequences(prompts))
    one, two = critic(), critic()
    values = one.compute_values(batch)
    assert_equal(values, call_with_needs(two, "compute_values", batch))
    batch.union(values)
    expected = metrics_of(one.update_critic(batch))
    assert metrics_of(call_with_needs(two, "update_critic", batch)) == expected
