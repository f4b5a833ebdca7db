"""verl's public names, each of them Caldera's.

Modules below this one are no files: they are made of the table in `verl._names`.
"""

from __future__ import annotations

from typing import Any

from verl._finder import install, resolve

__all__ = ["DataProto", "__version__"]

install()


def __getattr__(name: str) -> Any:
    """They bring torch along, for which `python3 -m verl.trainer.main_ppo --help` need not wait."""
    if name == "DataProto":
        return resolve("caldera.protocol:DataProto")
    if name == "__version__":
        return resolve("caldera:__version__")
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
