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

Fingerprint = dict[str, Any]


def fingerprint(path: Path) -> Fingerprint:
    """Size and SHA-256 of a file; of a large one, that of a sample."""
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
        if not READS.search(last) or last in WRITES:
            continue
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and text:
                path = Path(text.removeprefix("file://")).expanduser()
                found.setdefault(key, {}).update(_of(path))
    return found


def _of(path: Path) -> dict[str, Fingerprint]:
    return {str(file.absolute()): fingerprint(file) for file in _files(path)}


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file for file in path.iterdir() if file.is_file())
