"""Supervised training with strategy=megatron: the numbers of one plain process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from caldera.config.loader import SCHEMAS, load_supervised_config
from caldera.trainer.sft import run
from caldera.workers.preference import DIRECT
from caldera.workers.supervised import FINE_TUNING, Objective

if TYPE_CHECKING:
    from tests.conftest import Lessons

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

MORE = (
    "trainer.total_training_steps=4", "trainer.test_freq=2", "trainer.save_freq=4",
    # Numbers are compared after plain descent, which Megatron's distributed optimiser has not.
    "optim.optimizer=SGD", "optim.lr=0.01", "optim.override_optimizer_config.momentum=0.9",
)  # fmt: skip
OBJECTIVES: dict[str, tuple[str, Objective]] = {
    "sft": ("sft_trainer", FINE_TUNING),
    "dpo": ("dpo_trainer", DIRECT),
}
MEGATRON = ("model.strategy=megatron", "model.megatron.use_distributed_optimizer=False")


NAMES = (
    "step", "train/loss", "train/lr", "train/grad_norm", "train/tokens", "train/margin", "val/loss",
)  # fmt: skip
Rows = list[dict[str, Any]]


def train(lessons: Lessons, folder: Path, *more: str, command: str = "sft") -> Rows:
    """A run of two ranks with Megatron."""
    arguments = lessons.overrides(folder, *MORE, *MEGATRON, "trainer.n_gpus_per_node=2", *more)
    done = lessons.run(["caldera.cli", command], arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(lessons, folder)


def train_plainly(lessons: Lessons, folder: Path, *more: str, command: str = "sft") -> Rows:
    """A run of this process alone."""
    name, objective = OBJECTIVES[command]
    arguments = lessons.overrides(folder, *MORE, "model.strategy=local", *more)
    run(load_supervised_config(arguments, name, None, SCHEMAS[name]), objective)
    return rows_of(lessons, folder)


def rows_of(lessons: Lessons, folder: Path) -> Rows:
    rows = lessons.lab.metrics(folder)
    return [{name: row[name] for name in NAMES if name in row} for row in rows]


def near(rows: Rows) -> list[Any]:
    return [pytest.approx(row, rel=1e-5, abs=1e-5) for row in rows]


def test_fine_tuning_in_layers_shared_by_two(lessons: Lessons, tmp_path: Path) -> None:
    """And one plain process goes on from where it ends."""
    plain = train_plainly(lessons, tmp_path / "plain")
    rows = train(lessons, tmp_path / "two", "model.megatron.pipeline_model_parallel_size=2")
    assert rows == near(plain)
    assert any("val/loss" in row for row in rows)
    rows = train_plainly(lessons, tmp_path / "two", "trainer.total_training_steps=5")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


def test_pairs_stay_together(lessons: Lessons, tmp_path: Path) -> None:
    """DPO, in micro-batches by tokens that would tear pairs apart."""
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{a}+{b}", "chosen": str(a + b), "rejected": str(a * b + 3) * (1 + a % 3)}
        for a in range(5) for b in range(5)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = (
        f"data.train_files={file}", f"data.val_files={file}", "data.use_dynamic_bsz=True",
        "data.max_token_len_per_gpu=40",
    )  # fmt: skip
    plain = train_plainly(lessons, tmp_path / "plain", *pairs, command="dpo")
    layout = "model.megatron.tensor_model_parallel_size=2"
    found = train(lessons, tmp_path / "two", *pairs, layout, command="dpo")
    assert found == near(plain)
    assert found[-1]["train/margin"] != 0
