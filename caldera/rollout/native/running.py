"""The sequences that are being decoded, as arrays: a step costs no Python work per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caldera.rollout.base import FinishReason, Request
from caldera.rollout.native.blocks import IntArray, pages_for
from caldera.rollout.native.sampler import SamplingRows

NO_TOKEN = -1


@dataclass
class Sequence:
    """A request and what has been sampled for it before it was last put to wait."""

    index: int
    """Its place among the requests."""
    request: Request
    prompt: IntArray
    group: int
    """Sequences of one group have the same prompt."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def prefill_ids(self) -> IntArray:
        return np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int64)])

    @property
    def prefill_length(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.request.params.max_tokens


class Running:
    """A table with one row a running sequence, and the rows in the order of arrival."""

    def __init__(self, size: int, sequences: list[Sequence]) -> None:
        """`sequences` are all that may ever run here: they set the table's widths."""
        params = [sequence.request.params for sequence in sequences]
        longest = max(p.max_tokens for p in params)
        stops = max(1, *(len(p.stop_token_ids) for p in params))
        self.order: IntArray = np.empty(0, dtype=np.int64)
        self._sequences: list[Sequence | None] = [None] * size
        self._free = list(range(size - 1, -1, -1))
        self.cached: IntArray = np.zeros(size, dtype=np.int64)  # tokens in the key/value cache
        self.last_token: IntArray = np.zeros(size, dtype=np.int64)  # sampled, not yet in the cache
        self.max_pages: IntArray = np.zeros(size, dtype=np.int64)  # of the longest it may get
        self._generated: IntArray = np.zeros(size, dtype=np.int64)
        self._max_tokens: IntArray = np.zeros(size, dtype=np.int64)
        self._tokens: NDArray[np.int32] = np.zeros((size, longest), dtype=np.int32)
        self._log_probs: NDArray[np.float32] = np.zeros((size, longest), dtype=np.float32)
        self._stops: IntArray = np.full((size, stops), NO_TOKEN, dtype=np.int64)
        self._temperature: NDArray[np.float32] = np.zeros(size, dtype=np.float32)
        self._top_k: IntArray = np.zeros(size, dtype=np.int64)
        self._top_p: NDArray[np.float64] = np.zeros(size, dtype=np.float64)
        self._seed: NDArray[np.uint64] = np.zeros(size, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def admit(self, sequence: Sequence) -> int:
        """Give a sequence, whose tokens so far are being prefilled, a row."""
        row = self._free.pop()
        params = sequence.request.params
        self._sequences[row] = sequence
        self.order = np.append(self.order, row)
        self.cached[row] = sequence.prefill_length
        self.max_pages[row] = pages_for(sequence.max_length)
        count = len(sequence.token_ids)
        self._generated[row] = count
        self._tokens[row, :count] = sequence.token_ids
        self._log_probs[row, :count] = sequence.log_probs
        self._max_tokens[row] = params.max_tokens
        self._stops[row] = NO_TOKEN
        if not params.ignore_eos:
            self._stops[row, : len(params.stop_token_ids)] = sorted(params.stop_token_ids)
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._seed[row] = sequence.request.seed % 2**64
        return row

    def sampling(self, rows: IntArray) -> SamplingRows:
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            seed=self._seed[rows],
            generated=self._generated[rows],
        )

    def record(
        self, rows: IntArray, tokens: IntArray, log_probs: NDArray[np.float32]
    ) -> tuple[IntArray, IntArray]:
        """Note the token sampled for each row; returns the rows that stopped and that are full."""
        position = self._generated[rows]
        self._tokens[rows, position] = tokens
        self._log_probs[rows, position] = log_probs
        self._generated[rows] += 1
        self.last_token[rows] = tokens
        stopped = (self._stops[rows] == tokens[:, None]).any(axis=1)
        full = ~stopped & (self._generated[rows] == self._max_tokens[rows])
        return rows[stopped], rows[full]

    def release(self, rows: IntArray) -> list[Sequence]:
        """Take sequences out, with all that was sampled for them."""
        self.order = self.order[~np.isin(self.order, rows)]
        released = []
        for row in rows.tolist():
            sequence = self._sequences[row]
            assert sequence is not None, "a row that is released is taken"
            count = self._generated[row]
            sequence.token_ids = self._tokens[row, :count].tolist()
            sequence.log_probs = self._log_probs[row, :count].tolist()
            self._sequences[row] = None
            self._free.append(row)
            released.append(sequence)
        return released
