"""Files of a checkpoint that would run code are refused."""

from __future__ import annotations

import collections
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from caldera.engine.checkpoints import load, read_whole, save_distributed
from caldera.engine.checkpoints.classic import load_classic, save_classic
from caldera.engine.checkpoints.safe_loading import TRUST
from caldera.engine.checkpoints.storage import write
from caldera.engine.saving import extra_file, read_extra, restore_rng, rng_state, write_file
from caldera.errors import CheckpointError
from caldera.trainer.checkpoint import read_position

BOTH = ("model", "optimizer")


class Attack:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "actor"


def root() -> nn.Module:
    return nn.ModuleDict({"inner": nn.Linear(2, 2)})


def refused(mark: Path, name: str, work: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=f"{name}.*would run as code.*{TRUST}=1") as raised:
        work()
    assert not mark.exists()
    assert "damaged" not in str(raised.value)


def test_the_extra_state(folder: Path, mark: Path) -> None:
    folder.mkdir()
    write_file({"rng": rng_state()}, extra_file(folder, 0, 1))
    restore_rng(read_extra(folder, 0, 1)["rng"])
    write_file({"rng": Attack(mark)}, extra_file(folder, 0, 1))
    refused(mark, "extra_state_world_size_1_rank_0.pt", lambda: read_extra(folder, 0, 1))


def test_functions_of_modules_that_torch_blocks(folder: Path, mark: Path) -> None:
    class Command:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {mark}",)

    folder.mkdir()
    write_file({"rng": Command()}, extra_file(folder, 0, 1))
    refused(mark, "posix.system", lambda: read_extra(folder, 0, 1))


def test_the_place_in_the_data(folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    write_file({"step": 3}, folder / "data.pt")
    assert read_position(folder) == {"step": 3}
    write_file({"step": Attack(mark)}, folder / "data.pt")
    refused(mark, "data.pt", lambda: read_position(folder))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch's own, for other programs
    refused(mark, "data.pt", lambda: read_position(folder))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_flipped_bit_is_damage_wherever_it_is(folder: Path) -> None:
    folder.mkdir()
    file = folder / "data.pt"
    write_file({"step": 3, "order": [1, 2], "rng": torch.get_rng_state()[:16]}, file)
    intact = file.read_bytes()
    for place in range(len(intact)):
        file.write_bytes(intact[:place] + bytes([intact[place] ^ 4]) + intact[place + 1 :])
        with suppress(CheckpointError):
            read_position(folder)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_classic_files(folder: Path, mark: Path, kind: str) -> None:
    model = root()
    optimizer = torch.optim.AdamW(model.parameters())
    save_classic(model, optimizer, folder, BOTH)
    load_classic(model, optimizer, folder, BOTH)
    file = folder / f"{kind}_world_size_1_rank_0.pt"
    torch.save({"weight": Attack(mark)}, file)
    refused(mark, file.name, lambda: load_classic(model, optimizer, folder, BOTH))
    if kind == "model":
        refused(mark, file.name, lambda: dict(read_whole(folder)))  # as `caldera merge` does


def test_the_index_of_a_distributed_checkpoint(folder: Path, mark: Path) -> None:
    model = root()
    save_distributed(model, None, folder, BOTH)
    load(model, None, folder, BOTH)
    index = folder / "dist_ckpt/.metadata"
    with index.open("wb") as file:
        pickle.dump(Attack(mark), file)
    refused(mark, r"\.metadata", lambda: load(model, None, folder, BOTH))
    refused(mark, r"\.metadata", lambda: dict(read_whole(folder)))


@pytest.mark.parametrize("name", ["save", "load", "nn", "hub.load"])
def test_the_index_names_no_other_part_of_torch(folder: Path, mark: Path, name: str) -> None:
    model = root()
    save_distributed(model, None, folder, BOTH)
    index = f"\x80\x02ctorch\n{name}\n.".encode("latin1")
    (folder / "dist_ckpt/.metadata").write_bytes(index)
    refused(mark, f"torch.{name}", lambda: load(model, None, folder, BOTH))


@pytest.mark.parametrize("name", ["/etc/passwd", "../../secret", "%2fetc/passwd"])
def test_the_index_names_no_file_elsewhere(folder: Path, name: str) -> None:
    model = root()
    save_distributed(model, None, folder, BOTH)
    index = folder / "dist_ckpt/.metadata"
    metadata = pickle.loads(index.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    index.write_bytes(pickle.dumps(metadata))
    for work in (lambda: load(model, None, folder, BOTH), lambda: dict(read_whole(folder))):
        with pytest.raises(CheckpointError, match="has a file that is refused"):
            work()


@pytest.mark.parametrize("name", ["dist_ckpt/.metadata", "optim_world_size_1_rank_0.pt"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_flipped_bit_of_a_checkpoint_without_a_manifest(folder: Path, name: str) -> None:
    model = root()
    optimizer = torch.optim.AdamW(model.parameters())
    (save_distributed if "dist" in name else save_classic)(model, optimizer, folder, BOTH)
    file = folder / name
    intact = file.read_bytes()
    for place in range(3, len(intact), 61):
        file.write_bytes(intact[:place] + bytes([intact[place] ^ 8]) + intact[place + 1 :])
        with suppress(CheckpointError):
            load(model, optimizer, folder, BOTH)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("model", [1]),
        ("model", {1: torch.ones(1)}),
        ("optim", None),
        ("optim", {}),
        ("optim", {"state": 5, "param_groups": []}),
        ("optim", {"state": {}, "param_groups": [{}]}),
        ("optim", {"state": {9: {}}, "param_groups": [{"params": [0, 1]}]}),
    ],
)
def test_classic_files_of_something_else(folder: Path, kind: str, state: Any) -> None:
    model = root()
    optimizer = torch.optim.AdamW(model.parameters())
    save_classic(model, optimizer, folder, BOTH)
    torch.save(state, folder / f"{kind}_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=f"{kind}_world_size_1_rank_0.pt is damaged"):
        load_classic(model, optimizer, folder, BOTH)


def test_what_is_no_tensor_in_a_distributed_checkpoint(folder: Path, mark: Path) -> None:
    model = root()
    optimizer = torch.optim.AdamW(model.parameters())
    save_distributed(model, optimizer, folder, BOTH)
    load(model, optimizer, folder, BOTH)
    state = {"optimizer.param_groups": Attack(mark), "optimizer.values": {}}
    evil = folder.with_name("critic")
    write(state, FileSystemWriter(evil / "dist_ckpt"), None)
    refused(mark, "optimizer.param_groups", lambda: load(model, optimizer, evil, ("optimizer",)))


def test_files_of_somebody_trusted(
    folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    write_file({"of": collections.ChainMap()}, extra_file(folder, 0, 1))
    refused(mark, "collections.ChainMap", lambda: read_extra(folder, 0, 1))
    monkeypatch.setenv(TRUST, "1")
    assert read_extra(folder, 0, 1) == {"of": {}}
    monkeypatch.setenv(TRUST, "yes")
    with pytest.raises(CheckpointError, match=f"{TRUST}='yes': takes 1 or 0"):
        read_extra(folder, 0, 1)
