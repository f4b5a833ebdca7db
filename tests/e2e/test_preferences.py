"""Pairs of answers in runs of the real entry points: a reward model for PPO, and DPO."""

from __future__ import annotations

import json
import math
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

LARGEST = 4  # of the numbers that are added
ACCURACY = "val-core/caldera/arithmetic/acc/mean@16"


@dataclass(frozen=True)
class Pairs:
    """Right answers against wrong ones, and runs on them."""

    lab: Lab
    train_file: Path
    test_file: Path

    def arguments(self, run_dir: Path, *more: str) -> list[str]:
        return [
            f"data.train_files={self.train_file}",
            f"data.val_files={self.test_file}",
            "data.train_batch_size=50",
            "data.micro_batch_size_per_gpu=50",
            "data.max_length=10",
            f"model.partial_pretrain={self.lab.model}",
            "model.enable_gradient_checkpointing=False",
            "trainer.device=cpu",
            "trainer.logger=[file]",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run(list(command), "caldera.cli")

    def train(self, command: str, run_dir: Path, *more: str) -> list[dict[str, Any]]:
        """A run that must succeed; returns its metrics."""
        done = self.run(command, *self.arguments(run_dir, *more))
        assert done.returncode == 0, done.stdout + done.stderr
        return self.lab.metrics(run_dir)


@pytest.fixture(scope="module")
def pairs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Every sum with fifty wrong answers, of which every fifth is held out."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = random.Random(0)
    rows: list[dict[str, str]] = []
    for a in range(LARGEST + 1):
        for b in range(LARGEST + 1):
            right = str(a + b)
            for _ in range(50):
                wrong = right
                while wrong == right:
                    length = generator.choice([0, 1, 1, 1, 2, 3])
                    wrong = "".join(generator.choices("0123456789+=", k=length))
                rows.append({"prompt": f"{a}+{b}", "chosen": right, "rejected": wrong})
    generator.shuffle(rows)
    held_out = len(rows) // 5
    for name, part in (("train", rows[held_out:]), ("test", rows[:held_out])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return Pairs(lab, folder / "train.jsonl", folder / "test.jsonl")


@pytest.mark.slow
def test_a_reward_model_teaches_a_policy(pairs: Pairs, tmp_path: Path) -> None:
    """Trained on pairs, merged, and then all that a policy hears of its answers."""
    rows = pairs.train(
        "rm", tmp_path / "rm", "optim.lr=2e-3", "trainer.total_training_steps=120",
        "trainer.test_freq=40", "trainer.save_freq=120",
    )  # fmt: skip
    found = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    assert len(found) == 3
    assert found[-1] > 0.95  # 0.92, 0.97 and 0.996 when this was written
    model = tmp_path / "model"
    checkpoint = tmp_path / "rm" / "global_step_120"
    done = pairs.run("merge", "--local-dir", str(checkpoint), "--target-dir", str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pairs.lab.train(
        tmp_path / "ppo",
        "reward_model.enable=True",
        f"reward_model.model.path={model}",
        "reward_model.micro_batch_size_per_gpu=512",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=16",
        "trainer.val_before_train=True",
        "trainer.test_freq=1000000",  # after the last step
        "trainer.total_training_steps=50",
    )
    before, after = (row[ACCURACY] for row in rows if ACCURACY in row)
    assert after > before + 0.12  # by the rule, which the policy never heard of: 0.34 to 0.58
    assert rows[-1]["critic/score/mean"] > rows[1]["critic/score/mean"] + 1


def test_dpo_prefers_the_chosen_answers(pairs: Pairs, tmp_path: Path) -> None:
    rows = pairs.train(
        "dpo", tmp_path / "dpo", "optim.lr=2e-4", "trainer.total_training_steps=60",
        "trainer.test_freq=20", "trainer.save_freq=60",
    )  # fmt: skip
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert (rows[0]["train/accuracy"], rows[0]["train/margin"]) == (0.5, 0)
    told = [row for row in rows if "val/margin" in row]
    margins = [row["val/margin"] for row in told]
    assert margins == sorted(margins)
    assert margins[0] > 0
    assert told[-1]["val/accuracy"] > 0.8  # 0.69, 0.87 and 0.92
    assert told[-1]["val/chosen_reward"] > told[-1]["val/rejected_reward"]


@pytest.mark.parametrize("command", ["rm", "dpo"])
def test_a_run_goes_on_where_it_ended(pairs: Pairs, tmp_path: Path, command: str) -> None:
    """To the bit, the order of the pairs and the reference included."""
    steady = ("optim.lr=1e-3", "optim.lr_scheduler=constant", "optim.lr_warmup_steps_ratio=0")
    whole = pairs.train(command, tmp_path / "whole", *steady, "trainer.total_training_steps=4")
    for steps in (2, 4):
        parts = pairs.train(
            command, tmp_path / "parts", *steady,
            f"trainer.total_training_steps={steps}", "trainer.save_freq=2",
        )  # fmt: skip
    told = ("train/loss", "train/margin", "train/accuracy", "train/grad_norm")
    assert [[row[k] for k in told] for row in whole] == [[row[k] for k in told] for row in parts]
    assert len(whole) == 4


def test_mistakes_name_the_key(pairs: Pairs, tmp_path: Path) -> None:
    for command, argument, message in (
        ("rm", "data.chosen_key=better", "data.chosen_key='better': "),
        ("dpo", "data.max_length=5", "row "),
        ("dpo", "dpo.loss_type=best", "dpo.loss_type='best': takes one of sigmoid, ipo, hinge"),
    ):
        done = pairs.run(command, *pairs.arguments(tmp_path / "run", argument))
        assert done.returncode == 2
        assert f"caldera: error: {message}" in done.stderr
        assert "Traceback" not in done.stderr
