"""When weights go over from the engine to the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from caldera.protocol import DataProto

Policy = Callable[..., Any]
SEPARATE = "actor_rollout_ref.rollout.dtype=bfloat16"


def change(group: Any) -> None:
    """Stands for an optimiser step."""
    actor = group.workers[0].actor
    with torch.no_grad():
        next(actor.module.parameters()).fill_(3.0)
    actor.version += 1


def first_weight(group: Any) -> float:
    return next(group.workers[0].rollout.module.parameters()).flatten()[0].item()


def test_weights_go_over_when_asked(policy: Policy, prompts: DataProto) -> None:
    group = policy(SEPARATE)
    group.generate_sequences(prompts)
    change(group)
    assert first_weight(group) != 3.0
    group.update_weights()
    assert first_weight(group) == 3.0
    assert group.workers[0].rollout.version == 1


def test_they_do_not_go_over_again(policy: Policy, prompts: DataProto) -> None:
    group = policy(SEPARATE)
    change(group)
    group.update_weights()
    pushes: list[int] = []
    rollout = group.workers[0].rollout
    load_weights = rollout.load_weights

    def pushed(stream: Any, version: int) -> None:
        pushes.append(version)
        load_weights(stream, version)

    rollout.load_weights = pushed
    group.update_weights()
    group.generate_sequences(prompts)
    assert pushes == []
    change(group)
    group.generate_sequences(prompts)
    assert pushes == [2]


def test_a_shared_module_needs_nothing(policy: Policy) -> None:
    group = policy()
    change(group)
    group.update_weights()
    assert first_weight(group) == 3.0
    assert group.workers[0].rollout.version == 1


def test_offloaded_weights_go_over_too(policy: Policy, prompts: DataProto) -> None:
    memory = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    group = policy(SEPARATE, memory)
    change(group)
    group.update_weights()
    assert first_weight(group) == 3.0
