"""Reading a checkpoint's files without running code that somebody may have put into them.

A pickle can name any function and have it called. Here only the classes that checkpoints are made
of are known; any other name is an error, unless the user trusts the files.
"""

from __future__ import annotations

import collections
import logging
import os
import pathlib
import pickle
import re
from pathlib import Path
from typing import IO, Any, TypeGuard

import numpy as np
import torch
import torch.distributed.tensor  # has torch know DTensors and their meshes as safe
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from caldera.errors import CheckpointError
from caldera.storage.paths import check_names

logger = logging.getLogger(__name__)

TRUST = "CALDERA_TRUST_CHECKPOINT"
"""The environment variable that lets files run code: 1, or not set."""

# The state of numpy's random generator is an array; these rebuild one from bytes.
_RECONSTRUCT = np.zeros(1).__reduce__()[0]
SAFE: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    collections.defaultdict,
    _RECONSTRUCT,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # its name before numpy 2
]

_DCP = "torch.distributed.checkpoint."
_INDEX_NAMES = {
    *(
        (_DCP + "metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (_DCP + "filesystem", "_StorageInfo"),
    # Earlier versions of torch have the properties of a tensor here.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in (
            "PosixPath",
            "WindowsPath",
            "PurePosixPath",
            "PureWindowsPath",
        )
    ),
}


def is_trusted() -> bool:
    """Whether the user lets files of checkpoints run code."""
    value = os.environ.get(TRUST, "")
    if value not in ("", "0", "1"):
        raise CheckpointError(f"{TRUST}={value!r}: takes 1 or 0")
    return value == "1"


def load_file(source: Path | IO[bytes], told: Path, mmap: bool = False) -> Any:
    """What `torch.save` has written, on the CPU; `told` is the file that errors name."""
    if is_trusted():
        logger.warning("%s may run code: %s=1", told, TRUST)
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=False)
    try:
        with torch.serialization.safe_globals(SAFE):
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"unsupported GLOBAL [\w.]+", str(error))  # of os, sys and the like
        whole = blocked[0] if blocked else str(error)
        said = whole.rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        named = re.search(r"(?:GLOBAL|function|class) ([\w.]+)", said)
        if named is None:  # it is damaged
            raise pickle.UnpicklingError(said) from error
        raise _refused(told, named[1]) from error


def _refused(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} names {name}, which is no part of a checkpoint and would run as code: nothing was "
        f"read. If you trust the author of the file, set the environment variable {TRUST}=1"
    )


class SafeReader(FileSystemReader):
    """A torch distributed checkpoint, whose index (`.metadata`) is a pickle too."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with path.open("rb") as file:
            unpickler = pickle.Unpickler(file) if is_trusted() else _IndexUnpickler(file, path)
            try:
                metadata = unpickler.load()
            except (MemoryError, OverflowError) as error:  # of a length that is damaged
                raise pickle.UnpicklingError("a length beyond all memory") from error
        if not _is_index(metadata):
            raise CheckpointError(f"{path} is damaged: it holds no index of a checkpoint")
        check_names({info.relative_path for info in metadata.storage_data.values()}, str(path))
        # Earlier versions of torch have written none.
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _is_index(found: Any) -> TypeGuard[Metadata]:
    parts = vars(found) if isinstance(found, Metadata) else {}
    names, places = parts.get("state_dict_metadata"), parts.get("storage_data")
    return (
        isinstance(names, dict)
        and all(isinstance(name, str) and _is_described(one) for name, one in names.items())
        and isinstance(places, dict)
        and all(isinstance(getattr(one, "relative_path", None), str) for one in places.values())
    )


def _is_described(one: Any) -> bool:
    """Whether an entry of the index has the parts of its kind."""
    if isinstance(one, BytesStorageMetadata):
        return True
    parts = vars(one) if isinstance(one, TensorStorageMetadata) else {}
    return (
        isinstance(parts.get("size"), torch.Size)
        and isinstance(getattr(parts.get("properties"), "dtype", None), torch.dtype)
        and isinstance(parts.get("chunks"), list)
        and all({"offsets", "sizes"} <= vars(chunk).keys() for chunk in parts["chunks"])
    )


class _IndexUnpickler(pickle.Unpickler):
    """Knows what the index of a distributed checkpoint consists of."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _INDEX_NAMES:
            raise _refused(self._path, f"{module}.{name}")
        if module.startswith("pathlib"):  # where it was written, which nobody asks for
            return pathlib.PurePosixPath
        return super().find_class(module, name)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Fills tensors, and reads what is no tensor safely."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_file(value, self._folder / f"({name})")
