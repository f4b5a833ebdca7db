"""Batches in an order that survives a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from caldera.data.sampler import (
    AbstractCurriculumSampler,
    AbstractSampler,
    SampledRows,
    create_sampler,
)
from caldera.errors import CalderaError, CheckpointError, ConfigError, DataError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from caldera.config import DataConfig
    from caldera.protocol import DataProto


Batch = dict[str, torch.Tensor | npt.NDArray[np.object_]]


def collate_fn(rows: Sequence[dict[str, Any]]) -> Batch:
    """Stack the tensors of the rows; every other value goes into an object array of length B."""
    batch: Batch = {}
    for key in rows[0]:
        values = [_value(row, key, position) for position, row in enumerate(rows)]
        if isinstance(values[0], torch.Tensor):
            batch[key] = _stack(key, values)
        else:
            batch[key] = object_array(values)
    for position, row in enumerate(rows):
        if extra := row.keys() - batch.keys():
            raise DataError(f"row {position} of a batch has {sorted(extra)}, which row 0 has not")
    return batch


def object_array(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A 1-d object array, one element a value.

    `np.array(values, dtype=object)` would make two dimensions of lists of equal length.
    """
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def _value(row: dict[str, Any], key: str, position: int) -> Any:
    if key not in row:
        raise DataError(f"row {position} of a batch has no {key!r}, which row 0 has")
    return row[key]


def _stack(key: str, values: list[Any]) -> torch.Tensor:
    shapes = {
        tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        for value in values
    }
    if len(shapes) > 1:
        found = ", ".join(sorted(map(str, shapes)))
        raise DataError(f"the rows of a batch hold a {key!r} of different shapes: {found}")
    return torch.stack(values)


# ---- Lists of token ids to padded tensors

TRUNCATION_MODES = ("error", "left", "right", "middle")


def left_pad(rows: Sequence[Sequence[float]], length: int, pad_value: float) -> torch.Tensor:
    """Rows of at most `length` tokens as one (B, length) tensor, padding before the values."""
    return right_pad([row[::-1] for row in rows], length, pad_value).flip(1)


def right_pad(
    rows: Sequence[Sequence[float]],
    length: int,
    pad_value: float,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Rows of at most `length` values as one (B, length) tensor, padding after the values."""
    padded = torch.full((len(rows), length), pad_value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        assert len(row) <= length, f"a row of {len(row)} values cannot be padded to {length}"
        target[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def compute_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count the attended tokens along the last dimension; 0 on left padding."""
    return (attention_mask.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)


def truncate(ids: Sequence[int], max_length: int, mode: str) -> list[int]:
    """At most `max_length` of the ids: the tail (left), the head (right) or both ends (middle)."""
    if mode not in TRUNCATION_MODES:
        raise ConfigError(f"data.truncation={mode!r} is not one of {', '.join(TRUNCATION_MODES)}")
    if len(ids) <= max_length:
        return list(ids)
    if mode == "left":
        return list(ids[len(ids) - max_length :])
    if mode == "right":
        return list(ids[:max_length])
    if mode == "middle":
        head = max_length // 2
        return [*ids[:head], *ids[len(ids) - (max_length - head) :]]
    raise DataError(f"{len(ids)} tokens do not fit in {max_length}, and data.truncation is 'error'")


# ---- Random orders that are pure functions of their seeds


def seeded_permutation(count: int, *seeds: int) -> list[int]:
    """A random order of range(count), the same for the same seeds.

    It sorts raw draws, whose stream NumPy promises to keep; the stream of
    `Generator.permutation` may change between releases, and a resumed run would go astray.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64 for seed in seeds]))
    order: list[int] = np.argsort(bits.random_raw(count), kind="stable").tolist()
    return order


Collate = Callable[[Sequence[dict[str, Any]]], Batch]

ROW_COLUMN = "dataset_row"
"""In the batches of a sampler: which row of the data set each one is."""


class RowSource(Protocol):
    """The part of a data set that a loader needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> dict[str, Any]: ...


class StatefulLoader:
    """The batches of a data set, epoch after epoch.

    The order of epoch e is a pure function of (seed, e), so the whole state is a position in it:
    how many epochs, and batches of the current one, have been handed out. Batches that worker
    processes have prepared and nobody has taken do not count.

    With a sampler, that one chooses the rows. Its batches are formed here when they are asked for,
    and carry the numbers of their rows as `dataset_row`.
    """

    def __init__(
        self,
        dataset: RowSource,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        collate: Collate = collate_fn,
        sampler: AbstractSampler | None = None,
        seed_key: str = "data.seed",
    ) -> None:
        """`seed_key` is the config key of the seed, for errors."""
        assert sampler is None or num_workers == 0, "workers would ask for rows ahead of time"
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate = collate
        self.sampler = sampler
        self._seed_key = seed_key
        self._sampled = None if sampler is None else SampledRows(sampler, len(dataset))
        self.epoch = 0
        """The epoch of the next batch."""
        self.batches_done = 0
        """How many batches of that epoch have been handed out."""

    @property
    def rows_an_epoch(self) -> int:
        return len(self.dataset) if self._sampled is None else self._sampled.rows_an_epoch

    def __len__(self) -> int:
        """Batches an epoch."""
        rows = self.rows_an_epoch
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of the current epoch; afterwards the next epoch is current."""
        epoch, first = self.epoch, self.batches_done
        if self._sampled is not None:
            loaded = self._load_sampled(self._sampled, first)
        else:
            order = _epoch_order(len(self.dataset), self.shuffle, self.seed, epoch)
            batches = _chunks(order, self.batch_size)[first : len(self)]
            loaded = _load(self.dataset, batches, self.collate, self.num_workers)
        for done, batch in enumerate(loaded, start=first + 1):
            # Counted before it is handed out: a checkpoint is saved while the batch is in use.
            self.epoch, self.batches_done = (epoch + 1, 0) if done == len(self) else (epoch, done)
            yield batch

    def on_batch_end(self, batch: DataProto) -> None:
        """Tell a curriculum what came of a batch. The state that is saved next knows of it."""
        if isinstance(self.sampler, AbstractCurriculumSampler):
            self.sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest batch, and what it is a position in."""
        position = {"epoch": self.epoch, "batches_done": self.batches_done, **self._identity()}
        return position if self._sampled is None else position | self._sampled.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after the latest one that the saved loader had handed out.

        To be called before the first batch is taken. With another number of rows, the epoch goes on
        at the same batch of their order; it has ended if there are not that many.
        """
        names = {
            "dataset_length": "the number of training rows",
            "batch_size": "data.train_batch_size",
            "seed": self._seed_key,
            "shuffle": "data.shuffle",
            "drop_last": "drop_last",
            "sampler": "data.sampler",
        }
        state = {"sampler": None, **state}  # states from before there were samplers lack it
        if missing := {"epoch", "batches_done", *names} - state.keys():
            raise CheckpointError(f"the state of the data loader lacks {sorted(missing)}")
        rows, rows_now = state["dataset_length"], len(self.dataset)
        rows_may_change = self._sampled is None
        for field, now in self._identity().items():
            if state[field] != now and not (field == "dataset_length" and rows_may_change):
                raise CheckpointError(
                    f"the checkpoint's data order does not fit: {names[field]} was "
                    f"{state[field]} when it was saved and is {now} now; set it back, or start a "
                    "new run with the checkpoint's weights as its model"
                )
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        if rows != rows_now:
            if self.batches_done >= len(self):
                self.epoch, self.batches_done = self.epoch + 1, 0
            logger.warning(
                "the number of training rows was %d when the checkpoint was saved and is %d now: "
                "the run goes on with batch %d of epoch %d in the order of the new rows, of which "
                "some may have been trained on in this epoch and others never are",
                rows,
                rows_now,
                self.batches_done + 1,
                self.epoch + 1,
            )
        if self._sampled is not None:
            self._sampled.restore(state, self.epoch, self.batches_done * self.batch_size)

    def _load_sampled(self, sampled: SampledRows, first: int) -> Iterator[Batch]:
        for number in range(first, len(self)):
            left = sampled.rows_an_epoch - number * self.batch_size
            rows = sampled.take(min(self.batch_size, left))
            if number == len(self) - 1:
                sampled.end_epoch(unused=left - len(rows))
            batch = self.collate([self.dataset[row] for row in rows])
            yield {**batch, ROW_COLUMN: object_array(rows)}

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset_length": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "sampler": None if self._sampled is None else self._sampled.identity,
        }


class FixedLoader:
    """The same batches in the same order every time, the last one possibly smaller."""

    def __init__(
        self,
        dataset: RowSource,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = False,
        num_workers: int = 0,
        collate: Collate = collate_fn,
    ) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self.collate = collate
        self._batches = _chunks(_epoch_order(len(dataset), shuffle, seed, 0), batch_size)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return _load(self.dataset, self._batches, self.collate, self.num_workers)


def create_train_loader(
    dataset: RowSource, config: DataConfig, collate: Collate = collate_fn
) -> StatefulLoader:
    """The loader of the training batches; rows that fill no whole batch sit an epoch out."""
    assert config.seed is not None, "loading a configuration settles its seeds"
    batch_size = config.gen_batch_size or config.train_batch_size
    assert batch_size is not None, "it is chosen once the rows are counted"
    key = "gen_batch_size" if config.gen_batch_size else "train_batch_size"
    if len(dataset) < batch_size:
        raise DataError(
            f"the training set has {len(dataset)} rows, fewer than one batch of "
            f"data.{key}={batch_size}"
        )
    loader = StatefulLoader(
        dataset,
        batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        num_workers=config.dataloader_num_workers,
        collate=collate,
        sampler=create_sampler(dataset, config),
    )
    if len(loader) == 0:
        raise DataError(
            f"the sampler {config.sampler.class_name} draws {loader.rows_an_epoch} rows an epoch, "
            f"fewer than one batch of data.{key}={batch_size}"
        )
    return loader


def create_val_loader(
    dataset: RowSource, config: DataConfig, collate: Collate = collate_fn
) -> FixedLoader:
    """The loader of the validation batches: `data.val_batch_size` rows each, or all at once."""
    assert config.seed is not None, "loading a configuration settles its seeds"
    if len(dataset) == 0:
        raise DataError(
            f"the validation set has 0 rows, too few for data.val_batch_size="
            f"{config.val_batch_size}"
        )
    return FixedLoader(
        dataset,
        config.val_batch_size or len(dataset),
        seed=config.seed,
        shuffle=config.validation_shuffle,
        num_workers=config.dataloader_num_workers,
        collate=collate,
    )


def _epoch_order(rows: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    return seeded_permutation(rows, seed, epoch) if shuffle else list(range(rows))


def _chunks(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


class _Batches(Dataset[Batch | CalderaError]):
    """Whole batches as the items of a data set.

    A mistake of the user's is returned instead of raised: torch would raise it anew in the main
    process with the worker's traceback for a message.
    """

    def __init__(self, dataset: RowSource, batches: list[list[int]], collate: Collate) -> None:
        self.dataset = dataset
        self.batches = batches
        self.collate = collate

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, item: int) -> Batch | CalderaError:
        try:
            return self.collate([self.dataset[row] for row in self.batches[item]])
        except CalderaError as error:
            return error


def _load(
    dataset: RowSource, batches: list[list[int]], collate: Collate, num_workers: int
) -> Iterator[Batch]:
    loader: DataLoader[Batch | CalderaError] = DataLoader(
        _Batches(dataset, batches, collate),
        batch_size=None,
        collate_fn=_unchanged,
        # More workers than CPUs or batches would only wait, and do not change the result.
        num_workers=min(num_workers, _cpu_count(), len(batches)),
        # Without its own generator, torch would draw from the global one at every start, and a
        # resumed run starts more often than an uninterrupted one.
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, CalderaError):
            raise batch
        yield batch


def _cpu_count() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _unchanged(batch: Any) -> Any:
    return batch
