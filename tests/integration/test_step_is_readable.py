"""One training step, from prompts to new weights, is short enough to be read at a sitting."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from caldera.engine.packed_model import PackedModel
from caldera.engine.training import TrainingEngine
from caldera.trainer.ppo.advantage import compute_advantage
from caldera.trainer.ppo.trainer import PPOTrainer
from caldera.workers import ActorRolloutRefWorker, CriticWorker
from caldera.workers.losses import _kl_loss, policy_loss, value_loss
from caldera.workers.phases import log_prob_plan, train_epochs, update_plan

MOST_LINES = 300

# All that a reader meets on the way, but for the mathematics (core_algos), the sampler, and what
# an option switches on.
READ: list[Callable[..., Any]] = [
    PPOTrainer.step,
    PPOTrainer.rollout,
    PPOTrainer.score,
    PPOTrainer.evaluate,
    PPOTrainer.advantage,
    compute_advantage,
    PPOTrainer.update,
    ActorRolloutRefWorker.generate_sequences,
    ActorRolloutRefWorker.compute_log_prob,
    ActorRolloutRefWorker.compute_ref_log_prob,
    ActorRolloutRefWorker._infer,
    ActorRolloutRefWorker.update_actor,
    CriticWorker.compute_values,
    CriticWorker.update_critic,
    log_prob_plan,
    update_plan,
    train_epochs,
    policy_loss,
    _kl_loss,
    value_loss,
    TrainingEngine.infer,
    TrainingEngine.train,
    TrainingEngine._forward,
    PackedModel.forward,
    PackedModel._hidden,
]


def test_every_phase_of_a_step_is_counted() -> None:
    """A phase that is added to `step` is added to the list above."""
    called = [name for name in vars(PPOTrainer) if f"self.{name}(" in _source(READ[0])]
    assert len(called) == 5
    assert {f"PPOTrainer.{name}" for name in called} <= {part.__qualname__ for part in READ}


def test_a_step_takes_fewer_than_300_lines() -> None:
    lines = {part.__qualname__: _code_lines(part) for part in READ}
    assert sum(lines.values()) < MOST_LINES, lines


def _code_lines(part: Callable[..., Any]) -> int:
    """Lines of code without comments and docstring, a statement a line, however it is broken."""
    function = ast.parse(textwrap.dedent(_source(part))).body[0]
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function):
        del function.body[0]
    return len(ast.unparse(function).splitlines())


def _source(part: Callable[..., Any]) -> str:
    return inspect.getsource(inspect.unwrap(part))
