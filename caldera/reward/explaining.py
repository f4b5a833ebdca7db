"""What a score function raised, in a line."""

from __future__ import annotations

import traceback
from pathlib import Path

from caldera.data.own_code import own_frames

__all__ = ["explain", "first_line"]


def explain(error: BaseException) -> str:
    """One line: what a score function raised, and where in the user's own code."""
    frames = own_frames(error) or list(traceback.extract_tb(error.__traceback__))
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"the score function raised {first_line(said)}{where}"


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
