"""Names of files that somebody else chose, such as a server, before they become paths here."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import unquote

DRIVE = re.compile(r"[A-Za-z]:")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(name: str, where: str) -> str:
    """A path below a folder, with slashes, that stays below it on every system.

    Anything else is a PermissionError, which no further attempt would mend; `where` says who sent
    the name. Names are also read as if they were quoted, as often as there is anything to unquote,
    and with look-alikes of dots and slashes taken for what they look like: whoever reads them next
    may do so.
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
