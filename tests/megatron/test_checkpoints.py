"""A checkpoint of one layout goes on in any other, with Megatron or without, to the last bit.

Four processes are started once. A plain engine trains and saves; then each layout in turn reads
what the one before has written, writes it again, and trains on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

pytest.importorskip("megatron.core")

from caldera.cli import main
from caldera.config import CheckpointConfig, OptimizerConfig
from caldera.config.megatron import MegatronConfig
from caldera.engine import ENGINES, Engine, EngineOptions
from caldera.engine.checkpoints import StoredModel
from caldera.engine.checkpoints.storage import GROUPS, STATE, VALUES, read_alone, stored_under
from caldera.errors import CheckpointError
from tests.megatron.trials import HOST, LOSSES, MEMORY, PLANS, make_model, own_rows, source_of
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.megatron
Result = dict[Any, Any]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
PLAIN = {"use_distributed_optimizer": False}
PARTS = ["model", "optimizer", "extra"]
STEPS = 2
OPTIM = OptimizerConfig(
    lr=1e-3, weight_decay=0.1, lr_warmup_steps=6, total_training_steps=10,
    override_optimizer_config={"eps": 1e-5},
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """An engine in a chain of which each reads what the one before has written."""

    ranks: int
    layout: dict[str, Any] | None = None
    """Megatron's; None: the strategy's own."""
    strategy: str = "megatron"
    style: str = "dist"
    contents: list[str] = field(default_factory=lambda: list(PARTS))


CHAINS: dict[tuple[str, str], list[Link]] = {
    ("qwen2", "actor"): [  # tied
        Link(1, strategy="local"),
        Link(2, {TP: 2}),
        Link(2, {PP: 2}),
        Link(2, strategy="fsdp2"),
        Link(2, {PP: 2, VPP: 2}),
        Link(2, {}),
        Link(2, strategy="local", style="classic"),
        Link(2, PLAIN),
        Link(4, {TP: 2, PP: 2}),
        Link(4, {PP: 2}, contents=[*PARTS, "hf_model"]),
    ],
    ("qwen3_moe", "actor"): [
        Link(1, strategy="local"),
        Link(2, {EP: 2}),
        Link(2, strategy="fsdp2"),
        Link(2, {PP: 2}),
        Link(4, {EP: 2, TP: 2}),
        Link(4, {EP: 2}, contents=[*PARTS, "hf_model"]),
    ],
    ("llama", "critic"): [
        Link(1, strategy="local"),
        Link(2, {TP: 2}),
        Link(4, {TP: 2, **PLAIN}),
        Link(4, strategy="fsdp2"),
    ],
}
AGAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "rows by 2, half precision": (2, {"dtype": "bfloat16"}),
    "whole optimisers, half precision": (2, {"dtype": "bfloat16", **PLAIN}),
    "matrices by 2, layers by 2": (4, {TP: 2, PP: 2}),
}
LINKS = [(*chain, n) for chain, links in CHAINS.items() for n in range(1, len(links))]
# What one with a file a rank has written, the next has read.
FILES = [(family, kind, n) for family, kind, n in LINKS if CHAINS[family, kind][n].style == "dist"]


# ---------------------------------------------------------------------- what ranks do


def build(family: str, kind: str, link: Link, **checkpoint: Any) -> Engine:
    model = make_model(family, kind)
    options = EngineOptions(
        MEMORY, OPTIM, grad_clip=0.5, checkpoint=CheckpointConfig(layout=link.style, **checkpoint)
    )
    if link.layout is not None:
        config = MegatronConfig(**{"dtype": "float32", **link.layout})
        options = replace(options, megatron=config)
    source = None if link.strategy == "local" else source_of(model)
    return ENGINES[link.strategy](model, source, HOST, options)


def train(engine: Engine, kind: str) -> Result:
    curve = []
    for _ in range(STEPS):
        metrics = engine.train(own_rows(engine), LOSSES[kind], PLANS[kind])
        curve.append({name: float(value) for name, value in metrics.items()})
        curve[-1]["rate"] = engine.step_schedule()
    weights = {name: tensor.detach().clone() for name, tensor in engine.export_weights()}
    return {
        "curve": curve,
        "weights": weights,
        "version": engine.version,
        "speaks": engine.is_dp_leader,
        "random": torch.rand(3),
    }


@contextmanager
def world(rank: int, ranks: int, folder: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'meeting_{ranks}'}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=240),
    )  # fmt: skip
    yield
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def arrangement() -> Iterator[None]:
    """Megatron's groups of ranks are taken apart in the end."""
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()


def folder_of(folder: Path, chain: tuple[str, str], number: int) -> Path:
    return folder / "-".join(chain) / str(number)


def go_on(chain: tuple[str, str], number: int, folder: Path) -> Result:
    """Read what the link before wrote, write it again, and train on."""
    link = CHAINS[chain][number]
    engine = build(*chain, link)
    engine.load(folder_of(folder, chain, number - 1), PARTS)
    engine.save(folder_of(folder, chain, number), link.contents)
    engine.wait_for_save()
    return train(engine, chain[1])


def begin(chain: tuple[str, str], folder: Path) -> Result:
    engine = build(*chain, CHAINS[chain][0])
    train(engine, chain[1])
    engine.save(folder_of(folder, chain, 0), PARTS)
    return train(engine, chain[1])


def resume(layout: dict[str, Any], ranks: int, folder: Path) -> list[Result]:
    """Train on while the checkpoint is written, then again in a new engine that has read it."""
    engine = build("qwen2", "actor", Link(ranks, layout), async_save=True)
    train(engine, "actor")
    engine.save(folder, PARTS)
    first = train(engine, "actor")
    engine.wait_for_save()
    assert engine.is_saved()
    other = build("qwen2", "actor", Link(ranks, layout))
    other.load(folder, PARTS)
    return [first, train(other, "actor")]


def complaints(folder: Path) -> list[str]:
    """What each rank is told of checkpoints that do not fit or are damaged."""
    told = []
    start = folder_of(folder, ("qwen2", "actor"), 0)
    engine = build("llama", "critic", Link(2, {PP: 2}))
    partial, broken = folder / "partial", folder / "broken"
    engine.save(partial, ["model"])
    engine.save(broken, PARTS)
    if dist.get_rank() == 0:  # which only the first stage reads, and the other hears of
        next((broken / "dist_ckpt").glob("__0_*.distcp")).write_bytes(b"")
    dist.barrier()
    for path in (start, partial, broken, folder / "nowhere"):
        try:
            engine.load(path, PARTS)
        except CheckpointError as error:
            told.append(str(error))
    return told


def run_rank(rank: int, folder: Path) -> None:
    """All that one process does."""
    torch.set_num_threads(1)
    found: Result = {}
    if rank == 0:
        for chain in CHAINS:
            found[*chain, 0] = begin(chain, folder)
    for ranks in (2, 4):
        if rank >= ranks:
            continue
        with world(rank, ranks, folder):
            for family, kind, number in LINKS:
                if CHAINS[family, kind][number].ranks == ranks:
                    with arrangement():
                        found[family, kind, number] = go_on((family, kind), number, folder)
            for name, (size, layout) in AGAIN.items():
                if size == ranks:
                    with arrangement():
                        found[name] = resume(layout, ranks, folder / name)
            if ranks == 2:
                with arrangement():
                    found["complaints"] = complaints(folder)
    torch.save(found, folder / f"found_{rank}.pt")


# ---------------------------------------------------------------------- what is found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Result]:
    """What each of the ranks found out."""
    return run_ranks(__file__, 4, folder, "caldera.engine")


@lru_cache
def stored(path: Path) -> dict[str, Any]:
    """All that a folder holds of the model and its optimiser."""
    reader = FileSystemReader(path / "dist_ckpt")
    metadata = reader.read_metadata()
    model = StoredModel(path)
    held: dict[str, Any] = {name: model.tensor(name) for name in model.tensors}
    state = {
        STATE + name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored_under(STATE, metadata).items()
    }
    plain = {GROUPS: None, VALUES: None}
    read_alone(targets := {**state, **plain}, reader, metadata, path)
    assert set(metadata.state_dict_metadata) == {f"model.{name}" for name in held} | set(targets)
    return held | targets


def assert_same_files(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
    assert one[VALUES] == other[VALUES] == {}
    (group,), (expected,) = one[GROUPS], other[GROUPS]
    shared = group.keys() & expected.keys()
    assert {"params", "lr", "betas", "eps", "weight_decay"} <= shared
    assert {key: group[key] for key in shared} == {key: expected[key] for key in shared}


@pytest.mark.parametrize(("family", "kind", "number"), FILES)
def test_files_are_the_same(
    found: list[Result], folder: Path, family: str, kind: str, number: int
) -> None:
    """Names, shapes, types and every bit, of weights and of what Adam keeps."""
    start = stored(folder_of(folder, (family, kind), 0))
    assert len([name for name in start if name.endswith(".exp_avg")]) > 20
    assert_same_files(stored(folder_of(folder, (family, kind), number)), start)


@pytest.mark.parametrize(("family", "kind", "number"), LINKS)
def test_it_goes_on(found: list[Result], family: str, kind: str, number: int) -> None:
    """As the engine that was never interrupted."""
    alone = found[0][family, kind, 0]
    ranks = [rank[family, kind, number] for rank in found[: CHAINS[family, kind][number].ranks]]
    speakers = [rank for rank in ranks if rank["speaks"]]
    for step, expected in enumerate(alone["curve"]):
        means = {
            key: sum(rank["curve"][step][key] for rank in speakers) / len(speakers)
            for key in expected
        }
        assert means == pytest.approx(expected, rel=1e-6, abs=1e-6), f"step {step}"
    for rank in ranks:
        assert rank["version"] == alone["version"] == 2 * STEPS
        for key, value in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", AGAIN)
def test_the_same_layout_goes_on_to_the_last_bit(found: list[Result], name: str) -> None:
    """Weights, rates and random numbers, though training went on while the files were written."""
    for rank in found[: AGAIN[name][0]]:
        first, second = rank[name]
        assert second["curve"] == first["curve"]
        assert torch.equal(second["random"], first["random"])
        for key, value in first["weights"].items():
            assert torch.equal(second["weights"][key], value), key


def test_half_precision_is_stored_as_it_is_updated(found: list[Result], folder: Path) -> None:
    """In all digits, some of which the model does not compute with."""
    held = stored(folder / "rows by 2, half precision")
    weight = held["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
    assert held[f"{STATE}model.layers.0.mlp.up_proj.weight.exp_avg"].dtype == torch.float32


def test_what_does_not_fit(found: list[Result]) -> None:
    for rank in found[:2]:
        other, partial, broken, nowhere = rank["complaints"]
        assert "is of another model: the checkpoint lacks" in other
        assert "holds no optimiser" in partial
        assert "the checkpoint is incomplete or damaged" in broken
        assert "holds no checkpoint" in nowhere
    assert found[0]["complaints"] == found[1]["complaints"]


@pytest.mark.parametrize("chain", [("qwen2", "actor"), ("qwen3_moe", "actor")])
def test_merge(
    found: list[Result], folder: Path, tmp_path: Path, chain: tuple[str, str], capsys: Any
) -> None:
    """Into a folder for transformers, which is also what the engine has written itself."""
    last = folder_of(folder, chain, len(CHAINS[chain]) - 1)
    common = ("merge", "--backend", "megatron", "--local-dir", str(last))
    assert main([*common, "--target-dir", str(tmp_path / "model")]) == 0
    assert "largest difference 0" in capsys.readouterr().out
    for folder_to_test in (tmp_path / "model", last / "huggingface"):
        assert main(["merge", "test", *common[1:], "--test-hf-dir", str(folder_to_test)]) == 0
        assert "all are equal" in capsys.readouterr().out


if __name__ == "rank":
    run_rank(RANK, FOLDER)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
