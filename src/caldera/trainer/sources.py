"""Rollout sources: where a step's batch of scored responses comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from caldera.config import PPOTrainerConfig
from caldera.data import Batch
from caldera.protocol import DataProto
from caldera.trainer.metrics import Metrics
from caldera.trainer.ppo.dynamic_sampling import GroupFilter

__all__ = ["RolloutSource", "SynchronousSource"]


class RolloutSource(Protocol):
    """Hands a trainer one batch a step, of whole groups of scored responses.

    The trainer cannot tell whether they were sampled for this step or ahead of it.
    """

    def next_batch(
        self, rows: Iterator[Batch], timing: dict[str, float]
    ) -> tuple[DataProto, Metrics]:
        """(the batch, metrics of how it came about); takes as many prompts from `rows`, the stream
        of the run, as it needs, and adds the seconds of its phases to `timing`."""
        ...

    def on_new_weights(self, version: int) -> None:
        """The policy has been updated for the `version`-th time; the sampler has the weights."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; empty where nothing is in flight between steps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SynchronousSource:
    """Samples and scores at the beginning of a step, with the newest weights.

    With dynamic sampling (`algorithm.filter_groups`) it repeats until there are enough prompts
    whose responses differ.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        rollout: Callable[[Batch, int, dict[str, float]], DataProto],
        score: Callable[[DataProto, dict[str, float]], None],
    ) -> None:
        """`rollout` and `score` are the trainer's phases of those names."""
        self._config = config
        self._rollout = rollout
        self._score = score

    def next_batch(
        self, rows: Iterator[Batch], timing: dict[str, float]
    ) -> tuple[DataProto, Metrics]:
        groups = GroupFilter(self._config)
        while not groups.enough:  # once, but for dynamic sampling
            batch = self._rollout(next(rows), groups.batches, timing)
            self._score(batch, timing)
            groups.add(batch)
        return groups.take()

    def on_new_weights(self, version: int) -> None:
        """The next batch is sampled with them."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is in flight between steps."""
