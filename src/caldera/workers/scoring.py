"""What scores responses while others are sampled, as the sampler's worker sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from caldera.protocol import DataProto
from caldera.rollout.base import OnFinished

__all__ = ["MakeScorer", "NoScoring", "RolloutScoring", "Scorer"]


class RolloutScoring(Protocol):
    """The scoring of one batch, whose responses are sampled inside of its `with`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def on_finished(self) -> OnFinished | None:
        """Told of each response as it ends."""

    def join(self, responses: DataProto) -> DataProto:
        """The responses, with what is known of their rewards."""
        ...


Scorer = Callable[[DataProto], RolloutScoring]
"""Begins the scoring of a batch of prompts."""
MakeScorer = Callable[[], Scorer]
"""Called in the worker's process, to which it is sent."""


class NoScoring:
    """Responses are scored elsewhere."""

    on_finished = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing waits for responses."""

    def join(self, responses: DataProto) -> DataProto:
        return responses
