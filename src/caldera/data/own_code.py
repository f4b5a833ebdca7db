"""Where in the user's own code an exception came up."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["own_frames"]

_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_CALDERA = Path(__file__).parents[1]


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are neither a library's nor Caldera's, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if _is_the_users(frame.filename)]


def _is_the_users(filename: str) -> bool:
    path = Path(filename)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    is_ours = path.is_relative_to(_STANDARD_LIBRARY) or path.is_relative_to(_CALDERA)
    return not (is_installed or is_ours or filename.startswith("<frozen"))
