"""Dynamic batching: whatever waits while the model computes is computed next, together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

ScoreTokens = Callable[[list[list[int]]], Sequence[float]]
"""Sequences of tokens -> a score of each."""


@dataclass(frozen=True)
class _Waiting:
    tokens: list[int]
    score: Future[float] = field(default_factory=Future)


class Batcher:
    """Scores sequences from many callers, in the order in which they come.

    A batch has at most `max_tokens` tokens, unless one sequence alone has more, and at most
    `max_sequences` sequences. What a batch raises is raised to all its callers.
    """

    def __init__(self, score: ScoreTokens, max_tokens: int, max_sequences: int) -> None:
        self._score = score
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        # A call in a pool keeps whatever it raises, so that no batch can end the loop.
        self._model = ThreadPoolExecutor(1, "reward-model")
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, tokens: list[int]) -> Future[float]:
        waiting = _Waiting(tokens)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the batcher is closed")
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.score

    def close(self) -> None:
        """Score what waits, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._model.shutdown()

    def _work(self) -> None:
        while batch := self._take():
            outcome = self._model.submit(self._score, [waiting.tokens for waiting in batch])
            if error := outcome.exception():
                for waiting in batch:
                    waiting.score.set_exception(error)
                continue
            for waiting, score in zip(batch, outcome.result(), strict=True):
                waiting.score.set_result(float(score))

    def _take(self) -> list[_Waiting]:
        """The next batch, as soon as there is one; none when the batcher is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                # One whose caller has gone away is not computed.
                batch = [w for w in self._first() if w.score.set_running_or_notify_cancel()]
                if batch or (self._is_closed and not self._waiting):
                    return batch

    def _first(self) -> list[_Waiting]:
        """Those that wait longest, as many as make a batch."""
        taken: list[_Waiting] = []
        tokens = 0
        while self._waiting and len(taken) < self._max_sequences:
            tokens += len(self._waiting[0].tokens)
            if taken and tokens > self._max_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken
