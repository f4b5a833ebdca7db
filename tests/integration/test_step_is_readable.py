"""One training step, from prompts to new weights, is short enough to be read at a sitting."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from caldera.engine import LocalEngine
from caldera.trainer.ppo.ray_trainer import RayPPOTrainer
from caldera.workers import ActorRolloutRefWorker, CriticWorker
from caldera.workers.losses import policy_loss, value_loss
from caldera.workers.updates import train_epochs

MOST_LINES = 300

# All that a reader meets on the way, but for the mathematics (core_algos) and the sampler.
READ: list[Callable[..., Any]] = [
    RayPPOTrainer.step,
    RayPPOTrainer._rollout,
    RayPPOTrainer._score,
    RayPPOTrainer._evaluate,
    RayPPOTrainer._advantage,
    RayPPOTrainer._update,
    ActorRolloutRefWorker.generate_sequences,
    ActorRolloutRefWorker.compute_log_prob,
    ActorRolloutRefWorker.compute_ref_log_prob,
    ActorRolloutRefWorker._infer,
    ActorRolloutRefWorker.update_actor,
    CriticWorker.compute_values,
    CriticWorker.update_critic,
    train_epochs,
    policy_loss,
    value_loss,
    LocalEngine.infer,
    LocalEngine.train,
    LocalEngine._forward,
]


def test_every_phase_of_a_step_is_counted() -> None:
    """A phase that is added to `step` is added to the list above."""
    called = [name for name in vars(RayPPOTrainer) if f"self.{name}(" in _source(READ[0])]
    assert len(called) == 5
    assert {f"RayPPOTrainer.{name}" for name in called} <= {part.__qualname__ for part in READ}


def test_a_step_takes_fewer_than_300_lines() -> None:
    lines = {part.__qualname__: len(_source(part).splitlines()) for part in READ}
    assert sum(lines.values()) < MOST_LINES, lines


def _source(part: Callable[..., Any]) -> str:
    return inspect.getsource(inspect.unwrap(part))
