"""The one place that imports Ray, and only when something asks for it."""

from __future__ import annotations

import importlib
from typing import Any

from caldera.errors import ConfigError


def ray_module(name: str = "ray") -> Any:
    """Ray itself, or one of its modules such as "ray.exceptions"."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "trainer.worker_group='ray': Ray is not installed; install caldera[ray], "
            "or take 'local' for a run on this machine alone"
        ) from None
