"""What every entry point does around its work: logging, and errors that a person can act on."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from rich.logging import RichHandler

from caldera.errors import CalderaError
from caldera.tracking.console import CONSOLE

USER_ERROR = 2


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options, config overrides), which may stand in any order: argparse would mind."""
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    return [text for text in arguments if text not in overrides], overrides


def run_entry_point(work: Callable[[], None]) -> int:
    """Run the work; a mistake of the user's becomes one message and exit status 2."""
    level = os.environ.get("VERL_LOGGING_LEVEL", "INFO").upper()
    handler = RichHandler(console=CONSOLE, show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("caldera").setLevel(level)
    try:
        work()
    except CalderaError as error:
        if os.environ.get("CALDERA_TRACEBACK") == "1":
            traceback.print_exc()
        sys.stderr.write(f"caldera: error: {error}\n")
        return USER_ERROR
    return 0
