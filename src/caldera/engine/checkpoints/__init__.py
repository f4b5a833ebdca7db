"""Checkpoints of a model and its optimiser, which any layout of ranks reads.

Two layouts on disk: that of torch.distributed.checkpoint (`dist`), and one file a rank (`classic`).
"""

from __future__ import annotations

from caldera.engine.checkpoints.classic import load_classic, save_classic
from caldera.engine.checkpoints.distributed import (
    PendingSave,
    load_distributed,
    save_distributed,
    save_named,
)
from caldera.engine.checkpoints.whole import (
    Stored,
    StoredModel,
    layout_of,
    load,
    open_folder,
    read_whole,
)

__all__ = [
    "PendingSave",
    "Stored",
    "StoredModel",
    "layout_of",
    "load",
    "load_classic",
    "load_distributed",
    "open_folder",
    "read_whole",
    "save_classic",
    "save_distributed",
    "save_named",
]
