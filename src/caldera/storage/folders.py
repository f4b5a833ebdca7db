"""Temporary folders that bear the name of their owner, so that none outlives it for long."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"-(\d+)-(\d+)-[^-]*")


def own_folder(kind: str, root: Path) -> Path:
    """A new folder of this process. Those of the kind whose process is gone are removed first: one
    that was killed could not."""
    for folder in root.glob(f"{kind}-*"):
        if _is_orphan(folder.name.removeprefix(kind)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{_namespace()}-{os.getpid()}-", dir=root))


def _is_orphan(name: str) -> bool:
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) != _namespace():
        return False
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is somebody else's
        return False
    return False


def _namespace() -> int:
    """Within which a process number means something: containers may share the folders alone."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
