"""The classic layout of one process, and where the parts that several wrote belong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedModel

from caldera.engine.checkpoints import layout_of, read_whole
from caldera.engine.checkpoints.classic import Position, load_classic, save_classic
from caldera.errors import CheckpointError

BOTH = ("model", "optimizer")
Build = Callable[..., PreTrainedModel]
MODEL, OPTIM = "model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"


class Root(nn.Module):
    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        inner.set_attn_implementation("eager")  # for the model's own forward
        self.inner = inner


def adamw(root: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(root.parameters(), 0.01)


@pytest.fixture
def trained(tiny_model: Build) -> tuple[Root, torch.optim.AdamW]:
    root = Root(tiny_model("qwen2"))
    optimizer = adamw(root)
    for _ in range(2):
        root.inner(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return root, optimizer


def assert_loads(tiny_model: Build, folder: Path, root: Root, optimizer: Any) -> None:
    other = Root(tiny_model("qwen2", seed=1))
    its_own = adamw(other)
    load_classic(other, its_own, folder, BOTH)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, root.get_parameter(name)), name
    before, after = optimizer.state_dict()["state"], its_own.state_dict()["state"]
    assert before.keys() == after.keys()
    for number, kept in before.items():
        assert kept.keys() == after[number].keys()
        assert all(torch.equal(kept[key], after[number][key]) for key in kept)


def test_there_and_back(tiny_model: Build, tmp_path: Path, trained: Any) -> None:
    root, optimizer = trained
    save_classic(root, optimizer, tmp_path, BOTH)
    assert {path.name for path in tmp_path.iterdir()} == {MODEL, OPTIM, "fsdp_config.json"}
    config = json.loads((tmp_path / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": 1, "world_size": 1}
    assert layout_of(tmp_path) == "classic"
    assert_loads(tiny_model, tmp_path, root, optimizer)
    whole = dict(read_whole(tmp_path))
    assert whole.keys() == root.inner.state_dict().keys()
    assert all(torch.equal(whole[name], one) for name, one in root.inner.state_dict().items())


def test_torch_alone_reads_the_files(tiny_model: Build, tmp_path: Path, trained: Any) -> None:
    root, optimizer = trained
    save_classic(root, optimizer, tmp_path, BOTH)
    other = tiny_model("qwen2", seed=1)
    other.load_state_dict(torch.load(tmp_path / MODEL))
    assert torch.equal(other.lm_head.weight, root.inner.lm_head.weight)
    its_own = adamw(other)
    its_own.load_state_dict(torch.load(tmp_path / OPTIM))
    for number, kept in optimizer.state_dict()["state"].items():
        assert torch.equal(its_own.state_dict()["state"][number]["exp_avg"], kept["exp_avg"])


def test_files_that_count_parameters(tiny_model: Build, tmp_path: Path, trained: Any) -> None:
    """As earlier versions wrote them: the plain state of both."""
    root, optimizer = trained
    torch.save(root.inner.state_dict(), tmp_path / MODEL)
    torch.save(optimizer.state_dict(), tmp_path / OPTIM)
    assert_loads(tiny_model, tmp_path, root, optimizer)
    root.inner.lm_head.requires_grad_(False)
    fewer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad])
    with pytest.raises(CheckpointError, match=r"it trains 26 parameters in 1 groups, this run 25$"):
        load_classic(root, fewer, tmp_path, BOTH)


def test_what_is_missing(tiny_model: Build, tmp_path: Path, trained: Any) -> None:
    root, optimizer = trained
    with pytest.raises(CheckpointError, match=r"holds no files model_world_size_W_rank_R.pt"):
        load_classic(root, optimizer, tmp_path, BOTH)
    save_classic(root, None, tmp_path, BOTH)
    with pytest.raises(CheckpointError, match="holds no optimiser"):
        load_classic(root, optimizer, tmp_path, BOTH)
    load_classic(root, None, tmp_path, BOTH)
    torch.save({}, tmp_path / "model_world_size_3_rank_0.pt")
    load_classic(root, None, tmp_path, BOTH)  # fsdp_config.json tells which are meant
    (tmp_path / "fsdp_config.json").unlink()
    with pytest.raises(CheckpointError, match="files of several numbers of ranks"):
        load_classic(root, None, tmp_path, BOTH)
    (tmp_path / MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"world_size_3_rank_1.pt is missing"):
        load_classic(root, None, tmp_path, BOTH)


def test_what_is_no_model(tmp_path: Path, trained: Any) -> None:
    root, _ = trained
    torch.save({"lm_head.weight": "?"}, tmp_path / MODEL)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is no tensor: <class 'str'>"):
        load_classic(root, None, tmp_path, ["model"])
    (tmp_path / MODEL).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=f"{MODEL} is damaged"):
        load_classic(root, None, tmp_path, ["model"])


# ---------------------------------------------------------------------- parts of several ranks


def part(
    shape: tuple[int, ...], held: tuple[int, ...], mesh: DeviceMesh, placements: Any
) -> DTensor:
    """A rank's part as it comes out of a file, where no other process is known."""
    spec = DTensorSpec.__new__(DTensorSpec)
    strides = tuple(torch.empty(shape).stride())
    meta = TensorMeta(torch.Size(shape), strides, torch.float32)
    vars(spec).update(mesh=mesh, placements=placements, tensor_meta=meta)
    return DTensor(torch.zeros(held), spec, requires_grad=False)


def older_mesh(*shape: int, names: Any = None) -> DeviceMesh:
    """A mesh as versions of torch before 2.10 wrote it."""
    mesh = DeviceMesh.__new__(DeviceMesh)
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
    vars(mesh).update(mesh=ranks, mesh_dim_names=names, device_type="cuda")
    return mesh


def test_rows_of_several_ranks() -> None:
    mesh = older_mesh(4)
    rows = [2, 2, 1, 0]  # of five
    for rank, (count, begin) in enumerate(zip(rows, [0, 2, 4, 5], strict=True)):
        one = part((5, 3), (count, 3), mesh, (Shard(0),))
        assert Position(rank, 4, [one]).offset(one) == (begin, 0)


def test_replicas_and_columns() -> None:
    mesh = older_mesh(2, 3)
    for rank in range(6):
        one = part((4, 7), (4, [3, 3, 1][rank % 3]), mesh, (Replicate(), Shard(1)))
        assert Position(rank, 6, [one]).offset(one) == (0, rank % 3 * 3)


def test_a_mesh_of_some_ranks_goes_by_the_names_of_one_of_all() -> None:
    matrix = part((4, 4), (2, 2), older_mesh(2, 2, names=("dp", "tp")), (Shard(0), Shard(1)))
    norm = part((4,), (2,), older_mesh(2, names=("dp",)), (Shard(0),))
    position = Position(2, 4, [norm, matrix])
    assert position.offset(matrix) == (2, 0)
    assert position.offset(norm) == (2,)
    with pytest.raises(ValueError, match="does not say which of 4 ranks"):
        Position(2, 4, [norm]).offset(norm)


def test_parts_that_have_no_place() -> None:
    mesh = older_mesh(2)
    short = part((4,), (1,), mesh, (Shard(0),))
    with pytest.raises(ValueError, match=r"its part should be \(2,\), not \(1,\)"):
        Position(0, 2, [short]).offset(short)
    addend = part((4,), (4,), mesh, (Partial(),))
    with pytest.raises(ValueError, match="parts of sums"):
        Position(0, 2, [addend]).offset(addend)
