"""Training on pairs is the same on one rank and on several, whichever way they hold the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from caldera.config.loader import SCHEMAS, load_supervised_config
from caldera.config.sft import resolve_supervised
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import (
    Balancing,
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePool,
)
from caldera.workers.preference import DIRECT, REWARD_MODEL, pair_batch
from caldera.workers.supervised import Objective, SupervisedWorker

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system")

PAIRS, STEPS = 6, 3
OBJECTIVES: dict[str, tuple[str, Objective]] = {
    "rm": ("rm_trainer", REWARD_MODEL),
    "dpo": ("dpo_trainer", DIRECT),
}
BY_TOKENS = (
    "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=32", "data.balance_dp_token=True",
)  # fmt: skip
LAYOUTS = {
    "local": ("model.strategy=local", *BY_TOKENS),
    "fsdp": ("model.strategy=fsdp",),
    "fsdp2": ("model.strategy=fsdp2",),
    "fsdp2 by tokens": ("model.strategy=fsdp2", *BY_TOKENS),
    "tokens shared": ("model.strategy=fsdp2", "ulysses_sequence_parallel_size=2"),
}


def make_rows() -> DataProto:
    """Six pairs of different lengths."""
    generator = torch.Generator().manual_seed(3)

    def tokens(prompt: int, answer: int) -> tuple[list[int], list[int]]:
        ids = torch.randint(3, 15, (prompt + answer,), generator=generator).tolist()
        return ids, [0] * (prompt - 1) + [1] * answer + [0]

    items = [
        {"chosen": tokens(2 + i % 3, 1 + i), "rejected": tokens(2 + i % 3, 7 - i)}
        for i in range(PAIRS)
    ]
    return DataProto.from_single_dict(pair_batch(items, 0))


def train(lab: Lab, name: str, ranks: int, *more: str) -> tuple[list[dict[str, Any]], Any]:
    """Metrics of each step, and what the model says of every row afterwards."""
    config_name, objective = OBJECTIVES[name]
    config: Any = load_supervised_config(
        [
            "data.train_files=unused",
            f"data.train_batch_size={PAIRS}",
            "data.micro_batch_size_per_gpu=2",
            "data.max_length=16",
            f"model.partial_pretrain={lab.model}",
            "model.enable_gradient_checkpointing=False",
            # Not Adam, which makes large steps of gradients that are nothing but rounding.
            "optim.optimizer=SGD",
            "optim.override_optimizer_config.momentum=0.9",
            "optim.lr=0.05",
            "optim.lr_warmup_steps_ratio=0",
            f"trainer.n_gpus_per_node={ranks}",
            "trainer.device=cpu",
            *more,
        ],
        config_name, None, SCHEMAS[config_name],
    )  # fmt: skip
    resolve_supervised(config, gpus=0)
    recipe = ClassWithInitArgs(SupervisedWorker, config, objective, STEPS, "cpu")
    group = LocalWorkerGroup(ResourcePool([ranks]), recipe, name)
    try:
        group.init_model()
        rows = make_rows()
        group.balancing = Balancing(config.data.balance_dp_token, 2 * PAIRS, rows_together=2)
        steps = [group.train_batch(rows).meta_info["metrics"] for _ in range(STEPS)]
        # Five pairs do not fill two ranks: one is given twice, and told once.
        outputs = tensors_of(group.evaluate(rows[:10]))
        return [{k: sum(v) / len(v) for k, v in step.items()} for step in steps], outputs
    finally:
        group.shutdown()


@pytest.fixture(scope="module")
def alone(lab: Lab) -> dict[str, tuple[list[dict[str, Any]], Any]]:
    return {name: train(lab, name, 1, "model.strategy=local") for name in OBJECTIVES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_train_as_one(lab: Lab, alone: Any, name: str, layout: str) -> None:
    expected, rated = alone[name]
    steps, outputs = train(lab, name, 2, *LAYOUTS[layout])
    for one, other in zip(expected, steps, strict=True):
        compared = {k for k in one if k.startswith("train/") and k != "train/lr"}
        assert {"train/loss", "train/accuracy", "train/margin", "train/grad_norm"} <= compared
        for key in compared:
            assert other[key] == pytest.approx(one[key], rel=2e-4, abs=2e-5), key
    assert expected[-1]["train/loss"] < expected[0]["train/loss"]
    assert set(outputs.keys()) == set(rated.keys())
    for key, value in rated.items():
        torch.testing.assert_close(outputs[key], value, rtol=1e-3, atol=1e-4, msg=key)


def test_a_checkpoint_of_two_ranks_is_a_reward_model(lab: Lab, tmp_path: Path) -> None:
    """What was trained in shards is merged, and scores as PPO's reward model."""
    from transformers import AutoModelForSequenceClassification

    from caldera.commands.merging import MergeOptions, merge

    config_name, objective = OBJECTIVES["rm"]
    config: Any = load_supervised_config(
        [
            "data.train_files=unused", "data.train_batch_size=6", "data.max_length=16",
            f"model.partial_pretrain={lab.model}", "trainer.n_gpus_per_node=2",
            "trainer.device=cpu", "optim.lr=1e-2", "optim.lr_warmup_steps_ratio=0",
        ],
        config_name, None, SCHEMAS[config_name],
    )  # fmt: skip
    resolve_supervised(config, gpus=0)
    recipe = ClassWithInitArgs(SupervisedWorker, config, objective, STEPS, "cpu")
    group = LocalWorkerGroup(ResourcePool([2]), recipe, "judge")
    rows = make_rows()
    try:
        group.init_model()
        group.balancing = Balancing(False, 2 * PAIRS, rows_together=2)
        group.train_batch(rows)
        scores = tensors_of(group.evaluate(rows))["scores"].sum(1)  # (B,)
        group.save_checkpoint(tmp_path / "actor")
        group.wait_for_checkpoint()
    finally:
        group.shutdown()
    merge(MergeOptions(tmp_path / "actor"), tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tensors = tensors_of(rows)
    for row, score in enumerate(scores):
        ids = tensors["input_ids"][row][tensors["attention_mask"][row] == 1]
        with torch.no_grad():
            torch.testing.assert_close(model(ids[None]).logits[0, 0], score, rtol=1e-4, atol=1e-4)
