"""Supervised fine-tuning in its worker, against transformers on one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from caldera.config import SFTTrainerConfig, load_supervised_config, resolve_supervised
from caldera.data import engine_rows
from caldera.protocol import DataProto
from caldera.single_controller import LocalWorkerGroup, ResourcePool
from caldera.trainer.metrics import rank_metrics
from caldera.workers import SupervisedWorker
from caldera.workers.supervised import FINE_TUNING

SAMPLES = [  # tokens, and where the next one is trained
    ([3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 1, 0]),
    ([9, 10, 11], [0, 1, 0]),
    ([12, 13, 14, 15, 16, 17, 18, 19], [0, 1, 1, 0, 0, 1, 1, 0]),
    ([20, 21, 22, 23], [0, 0, 0, 0]),
    ([24, 25, 26, 27, 28], [1, 1, 1, 1, 0]),
]
STEPS = 3
Make = Callable[..., Any]


@pytest.fixture
def load(model_folder: Callable[..., str]) -> Callable[..., SFTTrainerConfig]:
    def make(*overrides: str) -> SFTTrainerConfig:
        given = [
            "data.train_files=unused",
            f"data.train_batch_size={len(SAMPLES)}",
            "data.micro_batch_size_per_gpu=2",
            "data.max_length=32",
            f"model.partial_pretrain={model_folder('qwen2')}",
            "optim.lr=0.01",
            "optim.lr_warmup_steps=0",
            "optim.clip_grad=0.5",
            *overrides,
        ]
        config = load_supervised_config(given, "sft_trainer", None, SFTTrainerConfig)
        resolve_supervised(config, gpus=0)
        return config

    return make


@pytest.fixture
def make(load: Callable[..., SFTTrainerConfig]) -> Make:
    """A group of one worker with its model loaded."""

    def build(*overrides: str) -> Any:
        config = load(*overrides)
        group = LocalWorkerGroup(
            ResourcePool((1,)), lambda: SupervisedWorker(config, FINE_TUNING, STEPS, "cpu")
        )
        group.init_model()
        return group

    return build


def batch() -> DataProto:
    return DataProto.from_single_dict(engine_rows(SAMPLES, pad_id=0))


def train(group: Any, steps: int = STEPS) -> list[dict[str, float]]:
    return [rank_metrics(group.train_batch(batch())) for _ in range(steps)]


def weights(group: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = group.workers[0].engine.module.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def plain_run(folder: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The same steps, written down with transformers and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item())
    )
    tokens = sum(sum(mask) for _, mask in SAMPLES)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for ids, mask in SAMPLES:
            logits = model(torch.tensor([ids])).logits[0, :-1]  # (T - 1, V)
            losses = cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            total = total + (losses * torch.tensor(mask[:-1])).sum()
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rate = schedule.get_last_lr()[0]
        schedule.step()
        found.append(
            {"train/loss": (total / tokens).item(), "train/grad_norm": norm.item(),
             "train/lr": rate}
        )  # fmt: skip
    return found, model.state_dict()


def assert_same(ours: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert {key: one[key] for key in other} == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("checkpointing", ["True", "False"])
def test_steps_are_those_of_transformers(
    make: Make, model_folder: Callable[..., str], checkpointing: str
) -> None:
    group = make(f"model.enable_gradient_checkpointing={checkpointing}")
    expected, state = plain_run(model_folder("qwen2"))
    assert_same(train(group), expected)
    for name, tensor in weights(group).items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.micro_batch_size_per_gpu=1",),
        ("data.micro_batch_size_per_gpu=5",),
        ("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=32"),
    ],
)
def test_micro_batches_do_not_matter(make: Make, overrides: tuple[str, ...]) -> None:
    names = ("train/loss", "train/grad_norm", "train/lr")
    expected = [{name: row[name] for name in names} for row in train(make())]
    assert_same(train(make(*overrides)), expected)


def test_outputs_for_validation(make: Make, model_folder: Callable[..., str]) -> None:
    group = make()
    found = group.evaluate(batch()).batch["log_probs"]
    model = AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), attn_implementation="eager")
    for row, (ids, mask) in zip(found, SAMPLES, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        expected = -cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        seen = torch.tensor(mask[:-1])
        torch.testing.assert_close(row[: len(seen)], expected * seen, rtol=1e-4, atol=1e-5)
        assert not row[len(seen) :].any()


def test_an_adapter_is_trained_alone(make: Make) -> None:
    pytest.importorskip("peft")
    group = make("model.lora_rank=4", "model.lora_alpha=8")
    before = weights(group)
    metrics = train(group)
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    changed = {name for name, tensor in weights(group).items() if not tensor.equal(before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_a_checkpoint_goes_on_to_the_bit(make: Make, tmp_path: Path) -> None:
    group, again = make(), make()
    train(group, 1)
    group.save_checkpoint(tmp_path)
    assert group.checkpoint_written() == [True]
    group.wait_for_checkpoint()
    again.load_checkpoint(tmp_path)
    timeless = [
        {k: v for k, v in row.items() if not k.startswith("perf/")}
        for row in (*train(group, 2), *train(again, 2))
    ]
    assert timeless[:2] == timeless[2:]
    for name, tensor in weights(group).items():
        assert tensor.equal(weights(again)[name])


def test_a_step_without_tokens_changes_nothing_but_by_decay(make: Make) -> None:
    group = make("optim.weight_decay=0")
    before = weights(group)
    rows = DataProto.from_single_dict(engine_rows([([3, 4, 5], [0, 0, 0])], pad_id=0))
    assert rank_metrics(group.train_batch(rows))["train/loss"] == 0
    assert all(tensor.equal(before[name]) for name, tensor in weights(group).items())
