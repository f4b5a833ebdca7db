"""A model's safetensors files, in a folder or in the hub's cache, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from caldera.errors import DataError
from caldera.storage.paths import check_names


class WeightFiles:
    """The tensors of safetensors files by name.

    A file is open only while it is read: an open one stays mapped, and the pages that were read
    would pile up to the whole model.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._places: dict[str, str | Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                    self._places[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return dict(self._shapes)

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is in its file."""
        with safe_open(self._places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def find_weight_files(path: str) -> WeightFiles | None:
    """The files of a folder or hub name, fetched if need be; None where there are none.

    Looks where `from_pretrained` looks: for one file first, then for the index of several.
    """
    one = _find(path, SAFE_WEIGHTS_NAME)
    if one is not None:
        return WeightFiles([one])
    index = _find(path, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return None
    _check_index(index)
    shards, _ = get_checkpoint_shard_files(path, index)
    return WeightFiles(shards)


def _check_index(index: str) -> None:
    """The index came with the model: it may name files of the model's folder alone."""
    try:
        places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        check_names(set(places.values()), index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: no index of weights: {type(error).__name__}: {error}") from error
    except PermissionError as error:
        raise DataError(str(error)) from error


def _find(path: str, name: str) -> str | None:
    return cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
    )
