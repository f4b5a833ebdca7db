"""The interface of every engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from .buckets import Adapter, Bucket


@dataclass
class Event:
    """The tokens that an engine has sampled for a request since the last event."""

    number: int
    token_ids: list[int]
    log_probs: list[float]
    version: int
    """Of the weights."""
    finish_reason: str | None = None
    """stop or length, in the last event of a request; error, with `error`."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_log_probs: list[float] | None = None
    error: str | None = None


class SteppedEngine(Protocol):
    """One engine, in-process, in a subprocess or remote.

    Requests go by numbers; parameters are those of Caldera's SamplingParams.
    """

    def add(self, number: int, prompt_ids: list[int], params: dict[str, Any], seed: int) -> None:
        """Take in a request. Raises ValueError for one that the engine refuses."""

    def abort(self, number: int) -> None:
        """Drop a request, which has no more events."""

    def step(self) -> list[Event]:
        """The new events, after waiting for them a little."""

    def load_bucket(self, bucket: Bucket, first: bool) -> None:
        """Take a part of new weights, the `first` or another; it has been read when this
        returns."""

    def use_weights(self, version: int, adapter: Adapter | None) -> None:
        """Compute with the weights that have come, which are all, and with this adapter or none;
        forget what was computed with others."""

    def score(self, prompt_ids: list[int]) -> list[float]:
        """The log-prob of each token but the first, while no request is there."""

    def sleep(self) -> bool:
        """Give back memory, of weights and cache; False if this engine cannot here."""

    def wake_up(self, part: str | None) -> None:
        """Take the memory back: of `weights`, of `kv_cache`, or of both."""

    def close(self) -> None:
        """End it."""


class InferenceEngine(SteppedEngine, Protocol):
    """One engine of this process."""

    def has_work(self) -> bool:
        """Whether any request has not ended."""
