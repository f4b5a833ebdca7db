"""What runs agent loops over the sampler, as the sampler's worker sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from caldera.protocol import DataProto
from caldera.rollout import Rollout, SamplingParams
from caldera.rollout.base import OnFinished

__all__ = ["Agents", "MakeAgents"]


class Agents(Protocol):
    """Runs a trajectory for each row of a batch."""

    def __call__(
        self,
        rows: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        rollout: Rollout,
        params: SamplingParams,
        pad_token_id: int,
        on_finished: OnFinished | None,
    ) -> DataProto:
        """The trajectories as a batch; `on_finished` is told of each as soon as it ends."""
        ...


MakeAgents = Callable[[], Agents]
"""Called in the worker's process, to which it is sent."""
