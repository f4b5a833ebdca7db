"""What writes traces of sampled responses, as the sampler's worker sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from caldera.protocol import DataProto
from caldera.rollout.base import OnFinished

__all__ = ["MakeTracer", "NoTracing", "RolloutTracing", "Tracer"]


class RolloutTracing(Protocol):
    """The traces of one batch."""

    @property
    def on_finished(self) -> OnFinished | None:
        """Told of each response as it ends."""

    def write(self, responses: DataProto) -> None:
        """Hand the traces over; others write them while the run goes on."""
        ...


class Tracer(Protocol):
    """Traces the batches of a process."""

    def begin(self, prompts: DataProto, on_finished: OnFinished | None) -> RolloutTracing:
        """The tracing of a batch; `on_finished` is who else wants to know of each response."""
        ...

    def finish(self) -> None:
        """Wait for what is still to be written."""
        ...


MakeTracer = Callable[[int], Tracer]
"""Called in the worker's process, to which it is sent, with the rank of the process."""


class NoTracing:
    """Nothing is traced."""

    def __init__(self, on_finished: OnFinished | None) -> None:
        self.on_finished = on_finished

    def write(self, responses: DataProto) -> None:
        """There is nothing to write."""
