"""How this Caldera was installed, and the command that installs an extra of it."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

SOURCES = Path(__file__).parents[2]
"""In a checkout, the repository: the package is in its folder `src`."""
CONSTRAINTS = "constraints.txt"


def install_command(extra: str | None = None) -> str:
    """The shell command that installs Caldera's dependencies, or those of an extra.

    None of the commands upgrades Caldera by its bare name: an index may have another package of
    that name.
    """
    extras = f"[{extra}]" if extra else ""
    folder = checkout()
    if folder is None:
        return f"pip install {shlex.quote(f'caldera{extras}')}"
    here = shlex.quote(f".{extras}")
    return f"cd {shlex.quote(str(folder))} && pip install -c {CONSTRAINTS} -e {here}"


def checkout() -> Path | None:
    """The checkout that Caldera runs from or was installed from; None: there is none."""
    for folder in (SOURCES, _installed_from()):
        if folder is not None and (folder / CONSTRAINTS).is_file():
            return folder
    return None


def _installed_from() -> Path | None:
    """The folder that pip was given."""
    try:
        told = distribution("caldera").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(told)["url"]) if told else None
    return Path(url2pathname(url.path)) if url and url.scheme == "file" else None
