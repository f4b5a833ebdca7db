"""The sequences that are being decoded, as arrays: a step costs no Python work per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caldera.rollout.base import (
    Decode,
    FinishReason,
    OnFinished,
    OnToken,
    Request,
    completes_a_stop,
    window_of,
)
from caldera.rollout.native.blocks import IntArray, pages_for, widened
from caldera.rollout.native.sampler import Penalties, SamplingRows

NO_TOKEN = -1
NO_ROW = -1
NO_SEQUENCE = -1


@dataclass(eq=False)  # one is never another, whatever they hold
class Sequence:
    """A request and what has been sampled for it before it was last put to wait."""

    number: int
    request: Request
    prompt: IntArray
    on_token: OnToken | None = None
    on_finished: OnFinished | None = None
    decode: Decode | None = None
    """Needed where the request has stop strings."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Block hashes of its full pages, as far as they are known."""
    row: int = NO_ROW
    """Its row in the table of running sequences."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version of the weights, how many of the tokens it sampled), in order."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def lacks_prompt_log_probs(self) -> bool:
        wanted = self.request.params.prompt_logprobs
        return wanted and len(self.prompt_log_probs) < len(self.prompt) - 1

    @property
    def needs_synchronous_sampling(self) -> bool:
        """Whether all that was sampled must be known before its next token is chosen."""
        params = self.request.params
        return params.has_penalties or params.prompt_logprobs or params.logprobs > 0

    def prefill_ids(self) -> IntArray:
        if not self.token_ids:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int64)])

    @property
    def prefill_length(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.request.params.max_tokens

    @property
    def wants_pages(self) -> bool:
        """Whether it may need more of them than what is prefilled does."""
        return pages_for(self.max_length) > pages_for(self.prefill_length)

    def take_in(self, token_ids: list[int], log_probs: list[float], version: int) -> None:
        """Note tokens that were sampled since it was last put to wait, all by one version."""
        if not token_ids:
            return
        self.token_ids += token_ids
        self.log_probs += log_probs
        count = len(token_ids)
        if self.versions and self.versions[-1][0] == version:
            count += self.versions.pop()[1]
        self.versions.append((version, count))


class Running:
    """A table with one row a running sequence, and the rows in the order of arrival."""

    def __init__(self, size: int) -> None:
        self.order: IntArray = np.empty(0, dtype=np.int64)
        self.length: IntArray = _zeros(size, np.int64)  # tokens known, with the prompt's
        self.cached: IntArray = _zeros(size, np.int64)  # of these, tokens in the key/value cache
        self.max_pages: IntArray = _zeros(size, np.int64)  # of the longest it may get
        self.listened: NDArray[np.bool_] = _zeros(
            size, np.bool_
        )  # on_token is called for each token
        self.ranked: IntArray = _zeros(size, np.int64)  # most likely tokens to report with each
        self.number: IntArray = np.full(size, NO_SEQUENCE)  # of the sequence in each row
        self._sequences: list[Sequence | None] = [None] * size
        self._free = list(range(size - 1, -1, -1))
        self._admitted = _zeros(size, np.int64)  # tokens that were known when it got its row
        self._prompt = _zeros(size, np.int64)  # tokens of the prompt
        self._max_length = _zeros(size, np.int64)
        self._tokens: NDArray[np.int32] = np.zeros((size, 0), dtype=np.int32)  # by position
        self._log_probs: NDArray[np.float32] = np.zeros((size, 0), dtype=np.float32)
        self._stops: IntArray = np.full((size, 1), NO_TOKEN, dtype=np.int64)
        self._temperature = _zeros(size, np.float64)
        self._top_k = _zeros(size, np.int64)
        self._top_p = _zeros(size, np.float64)
        self._min_p = _zeros(size, np.float64)
        self._penalised = _zeros(size, np.bool_)
        self._penalties = np.zeros((3, size), dtype=np.float32)
        self._has_stops = _zeros(size, np.bool_)  # strings
        self._seed = _zeros(size, np.uint64)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def admit(self, sequence: Sequence) -> int:
        """Give a sequence, whose tokens so far are being prefilled, a row."""
        row = sequence.row = self._free.pop()
        params = sequence.request.params
        self._sequences[row] = sequence
        self.number[row] = sequence.number
        self.order = np.append(self.order, row)
        length = sequence.prefill_length
        self._make_room(sequence)
        self._tokens[row, :length] = sequence.prefill_ids()
        self.length[row] = self._admitted[row] = length
        self.cached[row] = 0
        self.max_pages[row] = pages_for(sequence.max_length)
        self.listened[row] = sequence.on_token is not None
        self._prompt[row] = len(sequence.prompt)
        self._max_length[row] = sequence.max_length
        self._stops[row] = NO_TOKEN
        if not params.ignore_eos:
            self._stops[row, : len(params.stop_token_ids)] = sorted(params.stop_token_ids)
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._penalised[row] = params.has_penalties
        self._penalties[:, row] = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._has_stops[row] = bool(params.stop)
        self.ranked[row] = params.logprobs
        self._seed[row] = sequence.request.seed % 2**64
        return row

    def _make_room(self, sequence: Sequence) -> None:
        params = sequence.request.params
        self._tokens = widened(self._tokens, sequence.max_length)
        self._log_probs = widened(self._log_probs, params.max_tokens)
        self._stops = widened(self._stops, len(params.stop_token_ids), NO_TOKEN)

    def at(self, row: int) -> Sequence:
        """The sequence of a row that is taken."""
        sequence = self._sequences[row]
        assert sequence is not None, "the row is free"
        return sequence

    def tokens(self, rows: IntArray, positions: IntArray) -> IntArray:
        """The tokens at some positions of some rows, as int64."""
        return self._tokens[rows, positions].astype(np.int64)

    def sampling(self, rows: IntArray) -> SamplingRows:
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            generated=self.length[rows] - self._prompt[rows],
        )

    def penalties(self, rows: IntArray) -> Penalties | None:
        """Those of the rows that have any; None if none has."""
        places = np.flatnonzero(self._penalised[rows])
        if not len(places):
            return None
        rows = rows[places]
        lengths = self.length[rows]
        repetition, presence, frequency = self._penalties[:, rows]
        return Penalties(
            rows=places,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            # Behind a row's own tokens an earlier sequence may have left none.
            tokens=self._tokens[rows, : lengths.max()].astype(np.int64).clip(min=0),
            prompts=self._prompt[rows],
            lengths=lengths,
        )

    def expect(self, rows: IntArray) -> IntArray:
        """A token is being sampled for each row; returns the positions it will have."""
        positions = self.length[rows]
        self._tokens[rows, positions] = NO_TOKEN
        self.length[rows] += 1
        return positions

    def record(
        self,
        rows: IntArray,
        positions: IntArray,
        tokens: IntArray,
        log_probs: NDArray[np.float32],
    ) -> tuple[IntArray, IntArray]:
        """Note what was sampled for each row; returns the rows that stopped and that are full.

        A row that stopped forgets what is being sampled for it behind that.
        """
        self._tokens[rows, positions] = tokens
        self._log_probs[rows, positions - self._prompt[rows]] = log_probs
        stopped = (self._stops[rows] == tokens[:, None]).any(axis=1)
        for place in np.flatnonzero(self._has_stops[rows] & ~stopped):
            stopped[place] = self._completes_a_stop(int(rows[place]), int(positions[place]) + 1)
        self.length[rows[stopped]] = positions[stopped] + 1
        full = ~stopped & (positions + 1 == self._max_length[rows])
        return rows[stopped], rows[full]

    def may_grow(self, rows: IntArray) -> NDArray[np.bool_]:
        """Which rows have not got, or are not getting, their last token."""
        return self.length[rows] < self._max_length[rows]

    def _completes_a_stop(self, row: int, end: int) -> bool:
        sequence = self.at(row)
        stops = sequence.request.params.stop
        start = max(self._prompt[row], end - window_of(stops))
        assert sequence.decode is not None, "stop strings were checked"
        return completes_a_stop(self._tokens[row, start:end].tolist(), stops, sequence.decode)

    def release(self, rows: IntArray, version: int) -> list[Sequence]:
        """Take sequences out, with all that was sampled for them, by this version of weights."""
        self.order = self.order[~np.isin(self.order, rows)]
        released = []
        for row in rows.tolist():
            sequence = self.at(row)
            start, end, prompt = self._admitted[row], self.length[row], self._prompt[row]
            log_probs = self._log_probs[row, start - prompt : end - prompt]
            sequence.take_in(self._tokens[row, start:end].tolist(), log_probs.tolist(), version)
            sequence.row = NO_ROW
            self._sequences[row] = None
            self.number[row] = NO_SEQUENCE
            self._free.append(row)
            released.append(sequence)
        return released


def _zeros(size: int, dtype: type[np.generic]) -> NDArray[Any]:
    return np.zeros(size, dtype=dtype)
