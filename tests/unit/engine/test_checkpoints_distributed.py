"""Checkpoints of one process that knows of no others; several are an integration test."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from transformers import PreTrainedModel
from transformers.optimization import Adafactor

from caldera.engine.checkpoints import (
    PendingSave,
    StoredModel,
    layout_of,
    load_distributed,
    read_whole,
    save_distributed,
)
from caldera.errors import CheckpointError

BOTH = ("model", "optimizer")
Build = Callable[..., PreTrainedModel]


class Root(nn.Module):
    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        inner.set_attn_implementation("eager")  # for the model's own forward
        self.inner = inner


def step(root: Root, optimizer: torch.optim.Optimizer, times: int = 2) -> list[float]:
    losses = []
    for _ in range(times):
        tokens = torch.arange(1, 13).reshape(2, 6)
        loss = root.inner(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(root: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], 0.01, **options)


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    before, after = one.state_dict()["state"], other.state_dict()["state"]
    assert before.keys() == after.keys()
    for number, kept in before.items():
        assert kept.keys() == after[number].keys()
        for key, value in kept.items():
            got = after[number][key]
            assert torch.equal(value, got) if isinstance(value, Tensor) else value == got
            assert getattr(value, "dtype", None) == getattr(got, "dtype", None)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda root: adamw(root, fused=True, amsgrad=True),
        lambda root: torch.optim.SGD(root.parameters(), 0.05, momentum=0.9),
        lambda root: torch.optim.SGD(root.parameters(), 0.05),
        lambda root: torch.optim.Adafactor(root.parameters(), 0.05),
        lambda root: Adafactor(root.parameters(), scale_parameter=True, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the latter has tied weights
def test_going_on_is_bit_identical(
    tiny_model: Build, tmp_path: Path, make: Any, family: str
) -> None:
    root = Root(tiny_model(family))
    optimizer = make(root)
    step(root, optimizer)
    save_distributed(root, optimizer, tmp_path, BOTH)
    weights = {name: p.detach().clone() for name, p in root.named_parameters()}

    other = Root(tiny_model(family, seed=1))
    its_own = make(other)
    load_distributed(other, its_own, tmp_path, BOTH)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert_same_state(optimizer, its_own)
    assert step(root, optimizer) == step(other, its_own)


def test_files_have_the_names_of_the_inner_module(tiny_model: Build, tmp_path: Path) -> None:
    root = Root(tiny_model("qwen2"))
    optimizer = adamw(root)
    step(root, optimizer)
    save_distributed(root, optimizer, tmp_path, BOTH)
    keys = FileSystemReader(tmp_path / "dist_ckpt").read_metadata().state_dict_metadata.keys()
    assert "model.model.norm.weight" in keys
    assert "optimizer.state.model.norm.weight.exp_avg" in keys
    assert "optimizer.state.lm_head.weight.exp_avg" not in keys  # tied: a name for one is enough
    assert layout_of(tmp_path) == "dist"
    whole = dict(read_whole(tmp_path))
    assert whole.keys() == root.inner.state_dict().keys() == StoredModel(tmp_path).tensors.keys()
    for name, tensor in root.inner.state_dict().items():
        assert torch.equal(whole[name], tensor)


def test_writing_while_training_goes_on(tiny_model: Build, tmp_path: Path) -> None:
    root = Root(tiny_model())
    optimizer = adamw(root)
    step(root, optimizer)
    expected = {name: tensor.clone() for name, tensor in root.inner.state_dict().items()}
    pending = save_distributed(root, optimizer, tmp_path, BOTH, asynchronous=True)
    losses = step(root, optimizer)
    pending.wait()
    pending.wait()  # which changes nothing
    assert pending.done()
    for name, tensor in read_whole(tmp_path):
        assert torch.equal(tensor, expected[name])
    other = Root(tiny_model(seed=1))
    its_own = adamw(other)
    load_distributed(other, its_own, tmp_path, BOTH)
    assert step(other, its_own) == losses


def test_contents_may_be_chosen(tiny_model: Build, tmp_path: Path) -> None:
    root = Root(tiny_model())
    optimizer = adamw(root)
    step(root, optimizer)
    save_distributed(root, optimizer, tmp_path / "model", ["model", "extra"])
    save_distributed(root, optimizer, tmp_path / "optimizer", ["optimizer"])
    save_distributed(root, None, tmp_path / "frozen", BOTH)
    other = Root(tiny_model(seed=1))
    before = other.inner.lm_head.weight.detach().clone()
    its_own = adamw(other)
    load_distributed(other, its_own, tmp_path / "optimizer", ["optimizer"])
    assert_same_state(optimizer, its_own)
    assert torch.equal(other.inner.lm_head.weight, before)
    load_distributed(other, None, tmp_path / "frozen", BOTH)
    assert torch.equal(other.inner.lm_head.weight, root.inner.lm_head.weight)
    with pytest.raises(CheckpointError, match=r"holds no optimiser: checkpoint.save_contents"):
        load_distributed(other, its_own, tmp_path / "model", BOTH)
    with pytest.raises(CheckpointError, match=r"holds no model: checkpoint.save_contents"):
        load_distributed(other, its_own, tmp_path / "optimizer", BOTH)


def test_states_keep_their_precision(tiny_model: Build, tmp_path: Path) -> None:
    """An optimiser's own load_state_dict would round them to that of the parameters."""
    root = Root(tiny_model().bfloat16())
    optimizer = adamw(root)
    step(root, optimizer, 1)
    for kept in optimizer.state.values():
        kept["exp_avg"] = kept["exp_avg"].double() / 3
    save_distributed(root, optimizer, tmp_path, BOTH)
    its_own = adamw(root)
    load_distributed(root, its_own, tmp_path, BOTH)
    assert_same_state(optimizer, its_own)


def test_options_of_groups(tiny_model: Build, tmp_path: Path) -> None:
    """What is computed comes from the checkpoint; how, from the run."""

    def grouped(root: Root, count: int, **options: Any) -> torch.optim.AdamW:
        parameters = list(root.parameters())
        first, rest = parameters[:count], parameters[count:]
        groups: list[dict[str, Any]] = [{"params": first}, {"params": rest, "lr": 0.5}]
        return torch.optim.AdamW(groups, 0.01, **options)

    root = Root(tiny_model())
    optimizer = grouped(root, 3, betas=(0.5, 0.9), fused=True)
    save_distributed(root, optimizer, tmp_path, BOTH)
    its_own = grouped(root, 3)
    its_own.param_groups[1]["lr"] = 7.0
    load_distributed(root, its_own, tmp_path, BOTH)
    assert [group["lr"] for group in its_own.param_groups] == [0.01, 0.5]
    assert [group["betas"] for group in its_own.param_groups] == [(0.5, 0.9)] * 2
    assert [group["fused"] for group in its_own.param_groups] == [None, None]
    assert sum(len(group["params"]) for group in its_own.param_groups) == len([*root.parameters()])
    with pytest.raises(CheckpointError, match=r"parameters of one group, .* are in several"):
        load_distributed(root, grouped(root, 5), tmp_path, BOTH)


# ---------------------------------------------------------------------- what does not fit


@pytest.fixture
def folder(tiny_model: Build, tmp_path: Path) -> Path:
    root = Root(tiny_model())
    optimizer = adamw(root)
    step(root, optimizer, 1)
    save_distributed(root, optimizer, tmp_path, BOTH)
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"num_hidden_layers": 1}, r"the model lacks model.layers.1.\S+, .* and 6 more$"),
        ({"num_hidden_layers": 3}, r"the checkpoint lacks model.layers.2.\S+, .* and 6 more$"),
        ({"vocab_size": 50}, r"shape is model.embed_tokens.weight, \(48, 32\) instead of \(50, 32"),
    ],
)
def test_another_model(
    tiny_model: Build, folder: Path, overrides: dict[str, Any], told: str
) -> None:
    other = Root(tiny_model(**overrides))
    with pytest.raises(CheckpointError, match=f"{folder} is of another model: .*{told}"):
        load_distributed(other, None, folder, BOTH)


def test_another_choice_of_trained_parameters(tiny_model: Build, folder: Path) -> None:
    root = Root(tiny_model())
    root.inner.lm_head.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"this run does not train lm_head.weight$"):
        load_distributed(root, adamw(root), folder, BOTH)
    save_distributed(root, adamw(root), folder / "other", BOTH)
    root.inner.lm_head.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"the checkpoint does not train lm_head.weight$"):
        load_distributed(root, adamw(root), folder / "other", BOTH)


def test_damage(tiny_model: Build, folder: Path) -> None:
    root = Root(tiny_model())
    data, metadata = folder / "dist_ckpt" / "__0_0.distcp", folder / "dist_ckpt" / ".metadata"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 8])
    with pytest.raises(CheckpointError, match=f"{folder} cannot be read, the .* damaged"):
        load_distributed(root, None, folder, BOTH)
    data.unlink()
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        dict(read_whole(folder))
    metadata.write_bytes(metadata.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot be read, the .* damaged"):
        load_distributed(root, None, folder, BOTH)
    metadata.unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load_distributed(root, None, folder, BOTH)
    shutil.rmtree(folder / "dist_ckpt")
    with pytest.raises(CheckpointError, match="holds no checkpoint: neither a folder dist_ckpt"):
        layout_of(folder)


def test_a_folder_that_cannot_be_written_to(tiny_model: Build, tmp_path: Path) -> None:
    (tmp_path / "dist_ckpt").write_text("in the way")
    root = Root(tiny_model())
    with pytest.raises(CheckpointError, match="dist_ckpt could not be written: FileExistsError"):
        save_distributed(root, None, tmp_path, BOTH)
    pending = save_distributed(root, None, tmp_path, BOTH, asynchronous=True)
    with pytest.raises(CheckpointError, match="dist_ckpt could not be written: FileExistsError"):
        pending.wait()


def test_a_full_disk(tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells what torch has no words for."""

    def fail(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    root, place = Root(tiny_model()), tmp_path / "dist_ckpt"
    expected = f"{place} could not be written: no space left on the disk of {place} (3 MB free)"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        save_distributed(root, None, tmp_path, BOTH)


def test_a_failed_write_is_told_to_whoever_waits() -> None:
    written: Future[None] = Future()
    written.set_exception(CheckpointError("the disk is full"))
    pending = PendingSave(written)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="full"):
            pending.wait()
