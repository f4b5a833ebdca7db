"""Programs and this process, until one of them is done or has used up its time."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Sequence

from caldera.reward.sandbox.slot import SECONDS_TO_END, Run, Slot, SlotDied
from caldera.reward.sandbox.turns import (
    NOBODY_WAITS,
    SECONDS_BETWEEN_LOOKS,
    Abandoned,
    IsAbandoned,
)

__all__ = ["exchange"]


def exchange(
    slot: Slot,
    runs: Sequence[Run],
    seconds: float,
    is_done: Callable[[], bool],
    is_abandoned: IsAbandoned | None = None,
) -> bool:
    """Write, read and wait until `is_done`, then end all `runs`. False where time ran out.

    When this returns, no process of theirs is left, and all that they wrote has been read. Nor is
    one left when it raises Abandoned, since nobody waits for them any more.
    """
    deadline = time.monotonic() + seconds
    longest_step = math.inf if is_abandoned is None else SECONDS_BETWEEN_LOOKS
    abandoned = False
    try:
        while not is_done() and not any(run.too_much for run in runs):
            abandoned = is_abandoned is not None and is_abandoned()
            if abandoned or (left := deadline - time.monotonic()) <= 0:
                break
            _step(slot, runs, min(left, longest_step))
        in_time = is_done() or any(run.too_much for run in runs)
        _end(slot, runs)
        if abandoned:
            raise Abandoned(NOBODY_WAITS)
        return in_time
    finally:
        for run in runs:
            run.close()


def _end(slot: Slot, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.report is None:
            slot.kill(run)
    deadline = time.monotonic() + SECONDS_TO_END
    while any(run.report is None or run.to_read for run in runs):
        if (left := deadline - time.monotonic()) <= 0:
            raise SlotDied("a sandbox's process does not answer")
        _step(slot, runs, left)


def _step(slot: Slot, runs: Sequence[Run], seconds: float) -> None:
    """One wait, and whatever became possible by it."""
    # A handful of descriptors: making the selector anew costs less than keeping it up to date.
    selector = selectors.PollSelector()
    selector.register(slot.control, selectors.EVENT_READ)
    for run in runs:
        for end in run.to_write:
            selector.register(end, selectors.EVENT_WRITE, run)
        for end in run.to_read:
            selector.register(end, selectors.EVENT_READ, run)
    for key, events in selector.select(seconds):
        if key.data is None:
            message = slot.receive()
            for run in runs:
                if run.identifier == message["id"]:
                    run.report = message
        elif events & selectors.EVENT_WRITE:
            key.data.write(key.fd)
        else:
            key.data.read(key.fd)
