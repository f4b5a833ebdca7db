"""Samplers of the user's own: which training rows come next."""

from __future__ import annotations

import inspect
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from caldera.data.importing import load_object
from caldera.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from caldera.config import DataConfig
    from caldera.data.loader import RowSource
    from caldera.protocol import DataProto

logger = logging.getLogger(__name__)

STATE_METHODS = ("state_dict", "load_state_dict")
STORABLE = (bool, int, float, str, bytes, type(None), torch.Tensor)


class AbstractSampler(ABC):
    """The order in which the rows of the training set are drawn.

    `iter(sampler)` is called at the start of each epoch, and is asked for the rows of a batch when
    the batch is formed, not earlier. An epoch draws `len(sampler)` rows, a number that is read
    once; incomplete batches are left out.

    A run that is resumed must draw the rows that the interrupted one would have drawn. Two kinds of
    sampler do so:

    - One without a state draws the same rows whenever it is made anew. It is made anew, and the
      rows that were drawn before are skipped.
    - One with a state has the methods `state_dict()` and `load_state_dict(state)`, of numbers,
      strings, tensors, lists, tuples and dicts. Once the state is loaded, `iter(sampler)` goes on
      after the last row that was drawn, and starts the next epoch if that row was the last of its
      epoch. A row counts as drawn when it is yielded, so a generator counts it before its `yield`.
    """

    def __init__(self, data_source: RowSource, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Numbers of rows of the data source, from 0; a row may come more than once."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows an epoch."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from what came of its rows.

    What it learns belongs to its state; without one, a resumed run starts from what it knew in the
    beginning.
    """

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Called after each step with its finished batch.

        A row of the data set stands there `rollout.n` times, and in any order: its number is in
        `batch.non_tensor_batch["dataset_row"]`.
        """


def create_sampler(data_source: RowSource, config: DataConfig) -> AbstractSampler | None:
    """The sampler that `data.sampler` names, or None if it names none."""
    chosen = config.sampler
    if chosen.class_path is None:
        return None
    sampler_class = load_object(chosen.class_path, chosen.class_name, "data.sampler")
    _check_class(sampler_class, f"{chosen.class_name!r} of {chosen.class_path}")
    sampler: AbstractSampler = sampler_class(data_source=data_source, data_config=config)
    if isinstance(sampler, AbstractCurriculumSampler) and not has_state(sampler):
        logger.warning(
            "%s has no state_dict: a resumed run will not know what it has learnt",
            chosen.class_name,
        )
    return sampler


def _check_class(loaded: Any, what: str) -> None:
    if not (isinstance(loaded, type) and issubclass(loaded, AbstractSampler)):
        raise ConfigError(f"data.sampler: {what} is not a subclass of caldera.data.AbstractSampler")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise ConfigError(f"data.sampler: {what} does not define {missing}")
    given = [name for name in STATE_METHODS if hasattr(loaded, name)]
    if len(given) == 1:
        raise ConfigError(
            f"data.sampler: {what} defines {given[0]} alone; it takes both or neither of "
            f"{' and '.join(STATE_METHODS)}"
        )


def has_state(sampler: AbstractSampler) -> bool:
    return all(hasattr(sampler, name) for name in STATE_METHODS)


class SampledRows:
    """The rows that a sampler draws, asked for as they are needed."""

    def __init__(self, sampler: AbstractSampler, dataset_length: int) -> None:
        self.sampler = sampler
        self.rows_an_epoch = len(sampler)
        self.name = type(sampler).__name__
        self.identity = f"{self.name} with {self.rows_an_epoch} rows an epoch"
        self._dataset_length = dataset_length
        self._epoch: Iterator[int] | None = None
        """The sampler's remaining indices of the current epoch; None: the epoch has not begun."""
        self.state_dict()  # one that cannot be saved is reported now, not at the first checkpoint

    def take(self, count: int) -> list[int]:
        """The next rows of the current epoch."""
        if count == 0:
            return []  # without a call of `iter`, which some samplers shuffle at
        rows = [self._checked(row) for row in self._draw(count)]
        if len(rows) < count:
            raise DataError(
                f"data.sampler: {self.name} ended before the {self.rows_an_epoch} rows that are "
                "its length"
            )
        return rows

    def end_epoch(self, unused: int) -> None:
        """Draw the last rows, for which there is no batch; the next row is of the next epoch."""
        self.take(unused)
        self._epoch = None

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state as `sampler_state`, if it has one."""
        if not has_state(self.sampler):
            return {}
        state = self.sampler.state_dict()  # type: ignore[attr-defined]
        _check_storable(state, f"{self.name}.state_dict()")
        return {"sampler_state": state}

    def restore(self, state: Mapping[str, Any], epochs: int, rows: int) -> None:
        """Go to where whole epochs and then some rows have been drawn."""
        saved, known = "sampler_state" in state, has_state(self.sampler)
        if saved != known:
            raise CheckpointError(
                f"the checkpoint's data order does not fit: {self.name} had "
                f"{'a' if saved else 'no'} state when it was saved and has "
                f"{'one' if known else 'none'} now"
            )
        if saved:
            self.sampler.load_state_dict(state["sampler_state"])  # type: ignore[attr-defined]
            return
        for _ in range(epochs):
            self.take(self.rows_an_epoch)
            self.end_epoch(0)
        self.take(rows)

    def _draw(self, count: int) -> list[Any]:
        if self._epoch is not None:
            return list(islice(self._epoch, count))
        self._epoch = iter(self.sampler)
        rows = list(islice(self._epoch, count))
        if not rows:  # it went on after the last row of the epoch before, where nothing is left
            self._epoch = iter(self.sampler)
            rows = list(islice(self._epoch, count))
        return rows

    def _checked(self, row: Any) -> int:
        try:
            number = operator.index(row)
        except TypeError:
            number = -1
        if not 0 <= number < self._dataset_length:
            raise DataError(
                f"data.sampler: {self.name} gave {row!r}; takes numbers of rows, from 0 to "
                f"{self._dataset_length - 1}"
            )
        return number


def _check_storable(value: Any, what: str) -> None:
    """Checkpoints are read without running code of theirs, so they hold plain values alone."""
    if type(value) in (list, tuple):
        for position, item in enumerate(value):
            _check_storable(item, f"{what}[{position}]")
    elif type(value) is dict:
        for key, item in value.items():
            _check_storable(key, f"a key of {what}")
            _check_storable(item, f"{what}[{key!r}]")
    elif type(value) not in STORABLE:
        raise CheckpointError(
            f"data.sampler: {what} is a {type(value).__module__}.{type(value).__name__}, which a "
            "checkpoint cannot hold; takes numbers, strings, tensors, lists, tuples and dicts"
        )
