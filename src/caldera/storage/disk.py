"""Writes that fail because a disk is full, whatever a library makes of that."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

NO_SPACE = "no space left on the disk"
SMALL = 16e6
"""Bytes: with fewer left, a write that failed has failed for want of space."""


def full_disk(error: BaseException, folder: Path) -> str | None:
    """What to say of a write to this folder that failed; None if it was not for want of space."""
    free = shutil.disk_usage(_existing(folder)).free
    if free >= SMALL and not _says_so(error):
        return None
    return f"{NO_SPACE} of {folder} ({free / 1e6:.0f} MB free)"


def _says_so(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        is_told = os.strerror(errno.ENOSPC) in str(seen)  # as libraries in other languages tell
        if is_told or (isinstance(seen, OSError) and seen.errno == errno.ENOSPC):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it: a full disk may have refused to make it."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
