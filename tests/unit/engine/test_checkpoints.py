"""What an engine saves, and that it goes on from there as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from caldera.config import OptimizerConfig
from caldera.core_algos import LossScale
from caldera.engine import ForwardPlan, LocalEngine, Outputs
from caldera.engine.saving import extra_file, read_extra, write_file
from caldera.errors import CheckpointError
from caldera.protocol import DataProto

Make = Callable[..., LocalEngine]
PLAN = ForwardPlan(("log_probs",), False, 2, None)
ALL = ["model", "optimizer", "extra"]
ADAMW = OptimizerConfig(lr=0.01, lr_scheduler_type="cosine", total_training_steps=8)


def noisy_loss(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    """Draws from each random generator, so that a lost state shows."""
    noise = torch.rand(()) + random.random() + np.random.rand()
    mask = rows.batch["response_mask"]
    return scale.aggregate(noise * outputs["log_probs"], mask, "token-mean"), {}


def train(engine: LocalEngine, batch: DataProto, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        engine.train(batch, noisy_loss, PLAN)
        rates.append(engine.step_schedule())
    return rates


def bits(engine: LocalEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_going_on_is_bit_identical(
    make_engine: Make,
    tiny_model: Callable[..., PreTrainedModel],
    batch: DataProto,
    tmp_path: Path,
    family: str,
) -> None:
    straight = make_engine(family, optim=ADAMW, grad_clip=1.0)
    train(straight, batch, 2)
    straight.save(tmp_path / "here", ALL)
    rates = train(straight, batch, 3)

    resumed = make_engine(tiny_model(family, seed=9), optim=ADAMW, grad_clip=1.0)
    resumed.load(tmp_path / "here", ALL)
    assert resumed.version == 2
    assert train(resumed, batch, 3) == rates
    assert resumed.version == straight.version == 5
    expected = bits(straight)
    for name, tensor in bits(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_files_of_a_checkpoint(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine(optim=ADAMW)
    engine.save(tmp_path, ALL)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"dist_ckpt", "extra_state_world_size_1_rank_0.pt"}


def test_contents_may_be_chosen(make_engine: Make, batch: DataProto, tmp_path: Path) -> None:
    engine = make_engine(optim=ADAMW)
    train(engine, batch, 1)
    engine.save(tmp_path, ["model"])
    assert {path.name for path in tmp_path.iterdir()} == {"dist_ckpt"}
    other = make_engine(optim=ADAMW)
    other.load(tmp_path, ["model"])
    assert other.version == 0
    expected = bits(engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in bits(other).items())


def test_the_rate_comes_back_without_the_optimiser(
    make_engine: Make, batch: DataProto, tmp_path: Path
) -> None:
    optim = OptimizerConfig(optimizer="SGD", lr=2.0, lr_warmup_steps=4)
    engine = make_engine(optim=optim)
    train(engine, batch, 3)
    engine.save(tmp_path, ["model", "extra"])
    resumed = make_engine(optim=optim)
    resumed.load(tmp_path, ["model", "extra"])
    before = bits(resumed)
    assert train(resumed, batch, 1) == [1.5]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in bits(resumed).items())


def test_a_hugging_face_folder(make_engine: Make, batch: DataProto, tmp_path: Path) -> None:
    engine = make_engine("qwen2", optim=ADAMW)
    train(engine, batch, 1)
    engine.save(tmp_path, ["hf_model"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface").state_dict()
    expected = engine.module.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("dist_ckpt/.metadata", r"\.metadata"),
        ("dist_ckpt/__0_0.distcp", r"__0_0\.distcp"),
        ("extra_state_world_size_1_rank_0.pt", r"extra_state_world_size_1_rank_0\.pt is missing"),
    ],
)
def test_a_missing_file(make_engine: Make, tmp_path: Path, lost: str, told: str) -> None:
    engine = make_engine(optim=ADAMW)
    engine.save(tmp_path, ALL)
    (tmp_path / lost).unlink()
    with pytest.raises(CheckpointError, match=told):
        engine.load(tmp_path, ALL)


def test_nothing_but_the_ranks_own_state(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine(optim=ADAMW)
    engine.save(tmp_path, ["extra"])
    assert {path.name for path in tmp_path.iterdir()} == {"extra_state_world_size_1_rank_0.pt"}
    engine.load(tmp_path, ["extra"])


@pytest.mark.parametrize("extra", [None, [1], {}, {"rng": {"cpu": torch.ones(3)}}])
def test_an_extra_state_of_something_else(make_engine: Make, tmp_path: Path, extra: object) -> None:
    engine = make_engine(optim=ADAMW)
    engine.save(tmp_path, ["extra"])
    write_file(extra, extra_file(tmp_path, 0, 1))
    with pytest.raises(CheckpointError, match="its extra state restores no random generators"):
        engine.load(tmp_path, ["extra"])


def test_another_number_of_ranks_goes_on_from_rank_0(
    make_engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(optim=ADAMW)
    engine.save(tmp_path, ALL)
    own = tmp_path / "extra_state_world_size_1_rank_0.pt"
    own.rename(tmp_path / "extra_state_world_size_4_rank_0.pt")
    drawn = torch.rand(())
    engine.load(tmp_path, ALL)
    assert torch.rand(()) == drawn
    assert "written by another number of ranks than the 1 there are now" in caplog.text


def test_a_rank_whose_file_is_lost(make_engine: Make, tmp_path: Path) -> None:
    """The other ranks' generators are not taken for its own."""
    make_engine(optim=ADAMW).save(tmp_path, ALL)
    own = tmp_path / "extra_state_world_size_1_rank_0.pt"
    own.rename(extra_file(tmp_path, 0, 2))
    assert read_extra(tmp_path, 0, 2)["version"] == 0
    with pytest.raises(CheckpointError, match=r"extra_state_world_size_2_rank_1\.pt is missing"):
        read_extra(tmp_path, 1, 2)


def test_a_checkpoint_of_another_model(make_engine: Make, tmp_path: Path) -> None:
    make_engine("qwen2").save(tmp_path, ALL)
    with pytest.raises(CheckpointError, match="is of another model: the model lacks"):
        make_engine("llama").load(tmp_path, ALL)
