"""A curriculum: prompts that the model answers right some of the time come again soon."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from caldera.data import AbstractCurriculumSampler
from caldera.protocol import DataProto, tensors_of


class EasyFirst(AbstractCurriculumSampler):
    """Every other row is one that is being learnt; the rest come from a walk through all rows.

    A group of answers that are all right or all wrong teaches GRPO nothing. So a row whose latest
    answers had a mean reward between 0 and 1 waits in a queue to be drawn again, and a row that is
    solved, or hopeless so far, waits until the walk comes by.
    """

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self.draws = 0
        self.walked = 0
        """Rows of the walk that have been drawn, from the start of the run."""
        self.queue: dict[int, None] = {}
        """Rows that are being learnt, the longest waiting first: a set that keeps its order."""
        self._walk: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        # Without an end: the loader takes len(self) rows an epoch. All that decides about the next
        # row is in the state, so a resumed run draws the same ones.
        while True:
            yield self._next_row()

    def _next_row(self) -> int:
        self.draws += 1
        if self.queue and self.draws % 2 == 0:
            row = next(iter(self.queue))
            del self.queue[row]
            return row
        walk, position = divmod(self.walked, len(self))
        self.walked += 1
        return self._order_of_walk(walk)[position]

    def _order_of_walk(self, walk: int) -> list[int]:
        """A random order that depends on nothing but the seed and the number of the walk."""
        if self._walk is None or self._walk[0] != walk:
            order = list(range(len(self)))
            random.Random(f"{self.data_config.seed}/{walk}").shuffle(order)
            self._walk = (walk, order)
        return self._walk[1]

    def update(self, batch: DataProto) -> None:
        rewards: dict[int, list[float]] = defaultdict(list)
        rows = batch.non_tensor_batch["dataset_row"]
        scores = tensors_of(batch)["token_level_scores"].sum(-1).tolist()  # (B,)
        for row, score in zip(rows, scores, strict=True):
            rewards[row].append(score)
        for row, group in rewards.items():
            self.queue.pop(row, None)
            if 0 < sum(group) / len(group) < 1:
                self.queue[row] = None

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws, "walked": self.walked, "queue": list(self.queue)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws, self.walked = state["draws"], state["walked"]
        self.queue = dict.fromkeys(state["queue"])
