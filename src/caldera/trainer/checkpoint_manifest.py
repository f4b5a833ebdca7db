"""The manifest of a checkpoint: size and checksum of each of its files, written when all are there.

It finds damage, such as a flipped bit or a file that was cut off. It is no signature: anyone who
can change the files can change it too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from caldera.errors import CheckpointError
from caldera.storage.writing import write_text_atomic

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ALGORITHM = "blake2b"
THREADS = min(16, os.cpu_count() or 1)
"""Files that are read at once; hashing leaves the interpreter to other threads."""


class DamagedCheckpointError(CheckpointError):
    """Files are not as they were written."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def write_manifest(folder: Path) -> None:
    """Describe all files of a complete `global_step_N`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(THREADS) as threads:
        files = {
            name: {"size": path.stat().st_size, ALGORITHM: digest}
            for name, path, digest in zip(names, paths, threads.map(_digest, paths), strict=True)
        }
    write_text_atomic(folder / MANIFEST, [json.dumps({"files": files}, indent=1)])


def verify(folder: Path, role: str | None = None) -> Path:
    """The folder, a `global_step_N`; complain of its first files, or a role's, that are damaged."""
    if not (folder / MANIFEST).is_file():
        logger.warning(
            "%s has no %s: whether its files are damaged cannot be checked", folder, MANIFEST
        )
        return folder
    files = _read(folder / MANIFEST)
    wanted = [name for name in files if role is None or name.startswith(f"{role}/")]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda name: _damage(folder / name, files[name]), wanted)
        if damage := [told for told in found if told is not None]:
            more = f" (and {len(damage) - 1} more files)" if len(damage) > 1 else ""
            raise DamagedCheckpointError(f"{damage[0]}{more}: the checkpoint is damaged", folder)
    return folder


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        files: dict[str, dict[str, Any]] = json.loads(path.read_text())["files"]
        assert all({"size", ALGORITHM} <= entry.keys() for entry in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        told = f"{path} cannot be read: the checkpoint is damaged"
        raise DamagedCheckpointError(told, path.parent) from error
    return files


def _damage(path: Path, expected: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"{path} has {size} bytes instead of {expected['size']}"
    return None if _digest(path) == expected[ALGORITHM] else f"{path} has another checksum"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
