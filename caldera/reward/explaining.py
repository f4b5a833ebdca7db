"""What a score function raised, in a line."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["explain", "first_line"]

_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_CALDERA = Path(__file__).parents[1]


def explain(error: BaseException) -> str:
    """One line: what a score function raised, and where in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_the_users(frame.filename)]
    where = ""
    if frames:
        last = (own or frames)[-1]
        where = f" ({Path(last.filename).name}:{last.lineno})"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"the score function raised {first_line(said)}{where}"


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _is_the_users(filename: str) -> bool:
    """Whether a file is neither a library's nor Caldera's."""
    path = Path(filename)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    is_ours = path.is_relative_to(_STANDARD_LIBRARY) or path.is_relative_to(_CALDERA)
    return not (is_installed or is_ours or filename.startswith("<frozen"))
