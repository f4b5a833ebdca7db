"""Fingerprints of the files that a run reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caldera.config.fields import walk

BLOCK = 2**20
HASHED_WHOLE = 64 * BLOCK
"""Files up to this size are read to their end."""
SAMPLES = 16
"""Blocks that are read of larger ones, evenly spaced: training changes all of a model's weights."""
READS = re.compile(r"(^|_)(path|files|pretrain|tokenizer)$")
"""The last part of keys that name what a run reads."""
WRITES = frozenset({"output_path", "save_path", "resume_from_path", "dist_checkpointing_path"})
"""Those that match, and do not."""
FUNCTION = re.compile(r"(.+\.py):\w+")
"""A function of a file, which any key may name."""
UNREADABLE = "unreadable"

Fingerprint = dict[str, Any]


def fingerprint(path: Path) -> Fingerprint:
    """Size and SHA-256 of a file; of a large one, that of a sample; or why it cannot be read."""
    try:
        return _fingerprint(path)
    except OSError as error:
        return {UNREADABLE: str(error.strerror)}


def _fingerprint(path: Path) -> Fingerprint:
    size = path.stat().st_size
    digest = hashlib.sha256()
    is_whole = size <= HASHED_WHOLE
    with path.open("rb") as file:
        if is_whole:
            while block := file.read(BLOCK):
                digest.update(block)
        else:
            for number in range(SAMPLES):
                file.seek((size - BLOCK) * number // (SAMPLES - 1))
                digest.update(file.read(BLOCK))
    return {"bytes": size, "sha256" if is_whole else "sampled_sha256": digest.hexdigest()}


def fingerprints(config: Any) -> dict[str, dict[str, Fingerprint]]:
    """Key -> file -> fingerprint, of all files on this machine that the config's keys name.

    What is no file here, such as a name on a hub or a URL, has no fingerprint: its dict is empty.
    """
    found: dict[str, dict[str, Fingerprint]] = {}
    for key, _, value in walk(config):
        last = key.rpartition(".")[2]
        is_read = bool(READS.search(last)) and last not in WRITES
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str) or not text:
                continue
            function = FUNCTION.fullmatch(text)
            if is_read or function:
                named = function[1] if function else text
                path = Path(named.removeprefix("file://")).expanduser()
                found.setdefault(key, {}).update(_of(path))
    return found


def _of(path: Path) -> dict[str, Fingerprint]:
    try:
        files = list(_files(path))
    except OSError as error:  # a folder that one may not look into
        return {str(path.absolute()): {UNREADABLE: str(error.strerror)}}
    return {str(file.absolute()): fingerprint(file) for file in files}


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file for file in path.iterdir() if file.is_file())
