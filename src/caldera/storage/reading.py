"""Small files that a key of the config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from caldera.errors import ConfigError
from caldera.storage.paths import local_path


def read_yaml(path: str, key: str) -> Any:
    """What a YAML file holds; `key` is the one that names it."""
    file = Path(local_path(path, key)).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file")
    try:
        return yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path}: not valid YAML: {error}") from error
