"""What some ranks write, others read: any number of them, laid out in any way, to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.engine.checkpoints import layout_of, load, read_whole
from caldera.errors import CheckpointError, WorkerError
from caldera.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from tests.integration.layout_workers import PARTS, Layouts, Trained, save

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system")
STYLES = ["dist", "classic"]
Groups = Callable[[int], Any]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    made: dict[int, Any] = {}

    def group(ranks: int) -> Any:
        if ranks not in made:
            recipe = ClassWithInitArgs(Layouts)
            made[ranks] = LocalWorkerGroup(ResourcePool([ranks]), recipe, f"layouts{ranks}")
        return made[ranks]

    yield group
    for one in made.values():
        one.shutdown()


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("style", STYLES)
def test_from_each_layout_to_the_next(groups: Groups, tmp_path: Path, style: str) -> None:
    """Begun on one process, and back there after every other."""
    local = Trained(seed=1)
    local.train(2)
    expected = local.whole()
    save(local, tmp_path / "0", style)
    losses = local.train(2)
    chain = [
        (2, "fsdp-1x2x1"),
        (4, "fsdp2-1x4x1"),
        (4, "fsdp_orig-1x4x1"),
        (4, "fsdp2-1x2x2"),
        (4, "fsdp-2x2x1"),
        (2, "fsdp2-1x2x1"),
        (4, "fsdp2-2x2x1"),
        (2, "local"),
        (2, "fsdp_orig-1x2x1"),
    ]
    for place, (ranks, layout) in enumerate(chain):
        group = groups(ranks)
        group.build(layout, seed=2)
        group.load(tmp_path / str(place))
        assert_same(group.whole()[0], expected)
        folder = tmp_path / str(place + 1)
        group.save(folder, style)
        assert layout_of(folder) == style
        assert_same(dict(read_whole(folder)), {n: expected[n] for n in dict(read_whole(folder))})
        for rank in group.train(2):
            assert rank == pytest.approx(losses, rel=0, abs=1e-6), layout
    back = Trained(seed=3)
    load(back.root, back.optimizer, tmp_path / str(len(chain)), PARTS)
    assert_same(back.whole(), expected)
    assert back.train(2) == losses


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", ["fsdp_orig-1x2x1", "fsdp2-1x2x1"])
def test_adapters(groups: Groups, tmp_path: Path, style: str, layout: str) -> None:
    """The optimiser knows them alone; the model is kept whole all the same."""
    group = groups(2)
    group.build(layout, lora=True, seed=1)
    group.train(2)
    group.save(tmp_path / "sharded", style)
    expected, losses = group.whole()[0], group.train(2)[0]
    assert all(".lora_" in name for name in expected if name.endswith("exp_avg"))

    local = Trained(lora=True, seed=2)
    load(local.root, local.optimizer, tmp_path / "sharded", PARTS)
    assert_same(local.whole(), expected)
    save(local, tmp_path / "local", style)
    assert local.train(2) == pytest.approx(losses, rel=0, abs=1e-6)

    group.build(layout, lora=True, seed=3)
    group.load(tmp_path / "local")
    assert_same(group.whole()[0], expected)


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("fused", "fsdp2-1x2x1"),
        ("sgd", "fsdp-1x2x1"),
        ("sgd", "fsdp2-1x2x1"),
        ("counting", "fsdp-1x2x1"),
        ("counting", "fsdp2-1x2x1"),
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_optimisers(
    groups: Groups, tmp_path: Path, style: str, optimizer: str, layout: str
) -> None:
    group = groups(2)
    group.build(layout, optimizer, seed=1)
    group.train(2)
    group.save(tmp_path / "sharded", style)
    expected, losses = group.whole()[0], group.train(2)[0]
    assert any(name.startswith("model.norm.weight ") for name in expected)

    local = Trained("local", optimizer, seed=2)
    load(local.root, local.optimizer, tmp_path / "sharded", PARTS)
    assert_same(local.whole(), expected)
    save(local, tmp_path / "local", style)
    assert local.train(2) == pytest.approx(losses, rel=0, abs=1e-6)

    group.build(layout, optimizer, seed=3)
    group.load(tmp_path / "local")
    assert_same(group.whole()[0], expected)
    assert group.train(2)[0] == pytest.approx(losses, rel=0, abs=1e-6)


def test_an_optimiser_that_has_not_stepped(groups: Groups, tmp_path: Path) -> None:
    group = groups(2)
    group.build("fsdp-1x2x1", seed=1)
    group.save(tmp_path / "new", "dist")
    losses = group.train(2)[0]
    local = Trained(seed=2)
    local.train(1)
    load(local.root, local.optimizer, tmp_path / "new", PARTS)
    assert local.train(2) == pytest.approx(losses, rel=0, abs=1e-6)


def test_a_gathered_root_is_written_as_shards(groups: Groups, tmp_path: Path) -> None:
    group = groups(2)
    group.build("fsdp2-1x2x1", seed=1)
    group.train(1)
    group.look()
    group.save(tmp_path / "looked", "dist")
    group.look()
    expected = group.whole()[0]
    group.look()
    group.load(tmp_path / "looked")
    assert_same(group.whole()[0], expected)


@pytest.mark.parametrize("layout", ["fsdp-1x2x1", "fsdp2-1x2x1", "local"])
def test_training_goes_on_while_a_checkpoint_is_written(
    groups: Groups, tmp_path: Path, layout: str
) -> None:
    group = groups(2)
    group.build(layout, seed=1)
    group.train(2)
    expected = group.whole()[0]
    group.begin_save(tmp_path / "background")
    losses = group.train(3)[0]
    assert group.end_save() == [True, True]
    local = Trained(seed=2)
    load(local.root, local.optimizer, tmp_path / "background", PARTS)
    assert_same(local.whole(), expected)
    assert local.train(3) == pytest.approx(losses, rel=0, abs=1e-6)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("layout", "least", "most"),
    [
        ("fsdp-1x2x1", 0.4, 0.5),  # a layer, which it gathers to cut it otherwise
        ("fsdp_orig-1x2x1", 0.4, 0.5),
        ("fsdp2-1x2x1", 0.0, 0.06),  # a rank's half of the largest matrix
        ("local", 0.0, 0.11),  # the largest matrix
    ],
)
def test_no_rank_gathers_more_than_a_layer(
    groups: Groups, tmp_path: Path, style: str, layout: str, least: float, most: float
) -> None:
    """The largest tensor that comes up is so much of all that the model has."""
    group = groups(2)
    group.build(layout, seed=1)
    group.train(1)
    parameters = sum(one.numel() for one in Trained().root.parameters())
    largest = max(group.largest_while_saving(tmp_path, style))
    assert least <= largest / parameters <= most


# ---------------------------------------------------------------------- files that do not fit


@pytest.fixture
def broken() -> Iterator[Any]:
    """A group that a test may break."""
    made = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Layouts), "broken")
    made.build("fsdp2-1x2x1", seed=1)
    made.train(1)
    yield made
    made.shutdown()


def test_a_failure_in_the_background_is_raised_by_the_wait(broken: Any, tmp_path: Path) -> None:
    (tmp_path / "dist_ckpt").write_text("in the way")
    broken.begin_save(tmp_path)
    broken.train(1)
    with pytest.raises(WorkerError, match="dist_ckpt could not be written by rank"):
        broken.end_save()


def test_a_state_that_cannot_be_flattened(broken: Any, tmp_path: Path) -> None:
    local = Trained("local", "counting")
    local.train(1)
    save(local, tmp_path, "dist")
    broken.build("fsdp-1x2x1", "counting")
    with pytest.raises(WorkerError, match=r"rows of \S+ has the shape .* fsdp2 can"):
        broken.load(tmp_path)


def test_a_damaged_file(broken: Any, tmp_path: Path) -> None:
    broken.save(tmp_path, "dist")
    victim = tmp_path / "dist_ckpt" / "__1_0.distcp"
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(WorkerError, match="the checkpoint is incomplete or damaged"):
        broken.load(tmp_path)


def test_a_lost_rank(groups: Groups, tmp_path: Path) -> None:
    group = groups(2)
    group.build("fsdp2-1x2x1", seed=1)
    group.save(tmp_path, "classic")
    lost = tmp_path / "model_world_size_2_rank_1.pt"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"rank_1.pt is missing: the checkpoint is incompl"):
        dict(read_whole(tmp_path))
    lost.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"rank_1.pt is damaged"):
        dict(read_whole(tmp_path))
    # The first rank's file in the place of the second: its part is there twice, or not at all.
    lost.write_bytes((tmp_path / "model_world_size_2_rank_0.pt").read_bytes())
    with pytest.raises(CheckpointError, match="rank 1 cannot be placed: its part should be"):
        dict(read_whole(tmp_path))


def test_outdated_tensors(groups: Groups, tmp_path: Path) -> None:
    group = groups(2)
    group.save_outdated(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank_0.pt holds ShardedTensors"):
        dict(read_whole(tmp_path))
    assert all("rank_0.pt holds ShardedTensors" in told for told in group.failure_to_load(tmp_path))


def test_pieces_of_flattened_parameters(groups: Groups, tmp_path: Path) -> None:
    """An optimiser's own state under FullyShardedDataParallel, as verl writes it."""
    group = groups(2)
    group.build("fsdp-1x2x1", seed=1)
    group.train(2)
    expected = group.whole()[0]
    group.save(tmp_path, "classic")
    group.save_flat(tmp_path)
    losses = group.train(2)[0]
    group.build("fsdp-1x2x1", seed=2)
    group.load(tmp_path)
    assert_same(group.whole()[0], expected)
    assert group.train(2)[0] == losses
    local = Trained(seed=3)
    with pytest.raises(CheckpointError, match="only strategy=fsdp on 2 ranks"):
        load(local.root, local.optimizer, tmp_path, PARTS)
    load(local.root, local.optimizer, tmp_path, ["model"])
    assert torch.equal(local.whole()["lm_head.weight"], expected["lm_head.weight"])
