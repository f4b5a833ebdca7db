"""Paths that may be URLs. A plain path costs nothing else of this package."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from caldera.errors import ConfigError

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
    """The cache folder: `CALDERA_CACHE`, or ~/.cache/caldera."""
    return Path(os.environ.get("CALDERA_CACHE") or "~/.cache/caldera").expanduser()


def shown_url(url: str) -> str:
    """The URL as messages show it: without who asks, and without a query, which may sign it."""
    return re.sub(r"//[^/]*@", "//***@", url.partition("?")[0])


def below_url(url: str, name: str) -> str:
    """The URL of something in the folder that a URL names."""
    folder, mark, query = url.partition("?")
    return f"{folder.rstrip('/')}/{name}{mark}{query}"


# ---- Names of files that somebody else chose, such as a server, before they become paths here

DRIVE = re.compile(r"[A-Za-z]:")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(name: str, where: str) -> str:
    """A path below a folder, with slashes, that stays below it on every system.

    Anything else is a PermissionError, which no further attempt would mend; `where` says who sent
    the name. Names are also read as if they were quoted, as often as there is anything to unquote,
    and with look-alikes of dots and slashes taken for what they look like: the next reader may
    do so.
    """
    read = name
    while True:
        for form in (read, unicodedata.normalize("NFKC", read)):
            if (fault := _fault(form)) is not None:
                raise PermissionError(f"{where} has a file that is refused: {name!r}: {fault}")
        further = unquote(read)
        if further == read:
            return name
        read = further


def check_names(names: Iterable[str], where: str) -> None:
    """The same of all files of one folder, which must also be able to stand side by side."""
    seen: dict[str, str] = {}
    for name in names:
        normal = unicodedata.normalize("NFC", check_name(name, where))
        if normal in seen:
            pair = f"{seen[normal]!r} and {name!r}"
            raise PermissionError(f"{where} has two files for one place: {pair}")
        seen[normal] = name
    for normal, name in seen.items():
        parts = normal.split("/")
        for length in range(1, len(parts)):
            if (file := seen.get("/".join(parts[:length]))) is not None:
                raise PermissionError(f"{where} has {name!r} below {file!r}, which is a file")


def _fault(name: str) -> str | None:
    parts = name.split("/")
    if name.startswith("/") or DRIVE.match(name):
        return "it is an absolute path"
    if "\\" in name:
        return "it has a backslash"
    if CONTROL.search(name):
        return "it has a control character"
    if any(part in ("", ".", "..") for part in parts):
        return "a part of its path is empty, '.' or '..'"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "it is no valid Unicode"
    return None


# ---- Small files that a key of the config names


def read_yaml(path: str, key: str) -> Any:
    """The contents of a YAML file; `key` is the one that names it."""
    file = Path(local_path(path, key)).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file")
    try:
        return yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path}: not valid YAML: {error}") from error
