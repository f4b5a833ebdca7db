"""The one place that imports Ray, and only when something asks for it."""

from __future__ import annotations

import importlib
from typing import Any

from caldera.errors import ConfigError
from caldera.installation import install_command


def ray_module(name: str = "ray") -> Any:
    """Ray itself, or one of its modules such as "ray.exceptions"."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "trainer.worker_group='ray': Ray is not installed; take 'local' for a run on this "
            f"machine alone, or: {install_command('ray')}"
        ) from None
