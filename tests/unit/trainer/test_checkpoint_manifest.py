"""`caldera merge` reads no damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from caldera.commands.merging import CheckpointModel, MergeOptions
from caldera.engine.checkpoints import save_distributed
from caldera.errors import CheckpointError
from caldera.trainer.checkpoint_manifest import verify, write_manifest


def test_a_flipped_byte_ends_a_merge(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_1"
    for role in ("actor", "critic"):
        save_distributed(nn.ModuleDict({"inner": nn.Linear(2, 2)}), None, folder / role, ["model"])
    write_manifest(folder)
    verify(folder)
    weights = folder / "actor/dist_ckpt/__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    verify(folder, "critic")
    for given in (folder, folder / "actor"):
        with pytest.raises(CheckpointError, match=f"{weights} has another checksum"):
            CheckpointModel(MergeOptions(given))
