"""What happens as responses end, in the process that samples them: scoring, tracing, custom hooks.

A run gives its sampler a list of `MakeHook`. The sampler makes the hooks at its first batch, begins
each of them for every batch, calls `on_finished` as each response ends, and lets `join` add to the
batch what the hook has found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, Self

from caldera.protocol import DataProto
from caldera.rollout.base import Completion, OnFinished


class BatchHook(Protocol):
    """One batch, whose responses are sampled inside of its `with`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        """No more responses will end."""

    def on_finished(self, place: int, completion: Completion) -> None:
        """The response of the row `place` has ended; the sampler waits until this returns."""

    def join(self, responses: DataProto) -> DataProto:
        """The whole batch, with what this hook adds to it."""
        ...


class ResponseHook(Protocol):
    """Lives as long as the sampler's process."""

    def begin(self, prompts: DataProto) -> BatchHook:
        """These prompts are about to be sampled."""
        ...

    def finish(self) -> None:
        """The run has ended: wait for what is still to be written."""
        ...


MakeHook = Callable[[int], ResponseHook]
"""(rank of the process) -> hook; called in the sampler's process, to which it is sent."""


class ResponseHooks:
    """The hooks of a process, made when it first samples."""

    def __init__(self, makers: Sequence[MakeHook]) -> None:
        self._makers = makers
        self._hooks: list[ResponseHook] | None = None

    def begin(self, prompts: DataProto, rank: int) -> BatchHooks:
        if self._hooks is None:
            self._hooks = [make(rank) for make in self._makers]
        return BatchHooks([hook.begin(prompts) for hook in self._hooks])

    def finish(self) -> None:
        for hook in self._hooks or ():
            hook.finish()


class BatchHooks(ExitStack):
    """All hooks of one batch, in their order."""

    def __init__(self, hooks: Sequence[BatchHook]) -> None:
        super().__init__()
        self._hooks = hooks

    @property
    def on_finished(self) -> OnFinished | None:
        """What the sampler calls as each response ends; None: nobody waits for it."""
        return self._call_all if self._hooks else None

    def _call_all(self, place: int, completion: Completion) -> None:
        for hook in self._hooks:
            hook.on_finished(place, completion)

    def __enter__(self) -> Self:
        for hook in self._hooks:
            self.enter_context(hook)
        return self

    def join(self, responses: DataProto) -> DataProto:
        for hook in self._hooks:
            responses = hook.join(responses)
        return responses
