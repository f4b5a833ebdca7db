"""Paths that may be URLs. Whoever has a plain path pays for nothing else of this package."""

from __future__ import annotations

import os
import re
from pathlib import Path

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
"""How names of files end that a tokenizer does without."""


def is_url(path: str) -> bool:
    """Whether this names a store, rather than a path or a name on the hub."""
    return "://" in path


def is_fetched(path: str) -> bool:
    """Whether this names something that is copied here before it is read."""
    return is_url(path) and not path.startswith("file://")


def local_path(path: str, key: str, skip: tuple[str, ...] = ()) -> str:
    """Where to read what `path` names: a URL is fetched into the cache, all else stays as it is.

    `key` is the config key that the path came from. Files of a folder whose names end in one of
    `skip` are left out.
    """
    if not is_fetched(path):
        return path.removeprefix("file://")
    from caldera.storage.fetching import fetch_once  # fsspec takes a moment to import

    return str(fetch_once(path, key, cache_folder() / "files", skip))


def cache_folder() -> Path:
    """What can be had again is kept here: `CALDERA_CACHE`, or ~/.cache/caldera."""
    return Path(os.environ.get("CALDERA_CACHE") or "~/.cache/caldera").expanduser()


def shown_url(url: str) -> str:
    """The URL as messages show it: without who asks, and without a query, which may sign it."""
    return re.sub(r"//[^/]*@", "//***@", url.partition("?")[0])


def below_url(url: str, name: str) -> str:
    """The URL of something in the folder that a URL names."""
    folder, mark, query = url.partition("?")
    return f"{folder.rstrip('/')}/{name}{mark}{query}"
