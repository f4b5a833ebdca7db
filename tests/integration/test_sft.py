"""Whole runs of supervised fine-tuning: the same numbers wherever the ranks are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from caldera.config import SFTTrainerConfig, load_supervised_config
from caldera.trainer.sft import run
from caldera.workers.supervised import FINE_TUNING

if TYPE_CHECKING:
    from tests.conftest import Lessons

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system")

TORCHRUN = ["torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2", "-m"]
CLASSIC, LATER = "caldera.trainer.fsdp_sft_trainer", "caldera.trainer.sft_trainer"
EQUAL = {"train/loss": 1e-5, "train/lr": 1e-5, "train/tokens": 0, "val/loss": 1e-5,
         "train/grad_norm": 1e-3}  # fmt: skip
"""Metrics that do not depend on where the ranks are, and how near they are."""
TWO_RANKS = "trainer.n_gpus_per_node=2"
BY_TOKENS = ("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=24")
EACH_EPOCH = "trainer.test_freq=after_each_epoch"
FAILING = """
import os, signal
import torch

class AdamW(torch.optim.AdamW):
    steps = 0

    def step(self, *args, **kwargs):
        AdamW.steps += 1
        if AdamW.steps == 3 and os.environ["RANK"] == "1":
            if os.environ["FAILURE"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("negative length")
        return super().step(*args, **kwargs)
"""


def train(
    lessons: Lessons, run_dir: Path, *more: str, name: str = "sft_trainer"
) -> list[dict[str, Any]]:
    """A run from this process; returns its metrics."""
    overrides = lessons.overrides(run_dir, EACH_EPOCH, *more)
    run(load_supervised_config(overrides, name, None, SFTTrainerConfig), FINE_TUNING)
    return lessons.lab.metrics(run_dir)


def assert_same(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in expected]
    for one, other in zip(ours, expected, strict=True):
        for key in (key for key in EQUAL if key in other):
            assert one[key] == pytest.approx(other[key], rel=EQUAL[key], abs=EQUAL[key]), key


@pytest.fixture(scope="module")
def alone(lessons: Lessons, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(lessons, tmp_path_factory.mktemp("alone"))


def test_metrics_of_a_step(alone: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in alone] == list(range(1, 9))
    assert [row["training/epoch"] for row in alone] == [0] * 4 + [1] * 4
    assert [row["step"] for row in alone if "val/loss" in row] == [4, 8]
    assert alone[-1]["train/loss"] < alone[0]["train/loss"]
    for key in ("perf/throughput", "timing_s/step", "perf/cpu_memory_used_gb"):
        assert alone[0][key] > 0


@pytest.mark.parametrize(
    "layout",
    [
        ("model.strategy=fsdp2",),
        ("model.strategy=fsdp", *BY_TOKENS, "data.balance_dp_token=True"),
        ("model.strategy=local", "data.balance_dp_token=True"),
        ("model.strategy=fsdp2", "ulysses_sequence_parallel_size=2", *BY_TOKENS),
    ],
    ids=lambda layout: " ".join(layout),
)
def test_two_ranks_are_one(
    lessons: Lessons, alone: list[dict[str, Any]], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    assert_same(train(lessons, tmp_path, TWO_RANKS, *layout), alone)


def test_dynamic_batches_are_fixed_ones(
    lessons: Lessons, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert_same(train(lessons, tmp_path, *BY_TOKENS, "data.pad_mode=right"), alone)


def test_the_validation_loss_is_that_of_all_tokens(lessons: Lessons, tmp_path: Path) -> None:
    rows = train(
        lessons, tmp_path, "optim.lr=0", "trainer.total_training_steps=1", "trainer.test_freq=1"
    )
    tokenizer = AutoTokenizer.from_pretrained(lessons.lab.model)
    model = AutoModelForCausalLM.from_pretrained(lessons.lab.model)
    import pyarrow.parquet

    total, count = 0.0, 0
    for row in pyarrow.parquet.read_table(lessons.folder / "test.parquet").to_pylist():
        prompt = tokenizer.encode(f"<bos>{row['question']}=", add_special_tokens=False)
        answer = tokenizer.encode(f"{row['answer']}<eos>", add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    assert rows[0]["val/loss"] == pytest.approx(total / count, rel=1e-5)


def test_conversations_with_an_adapter(lessons: Lessons, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    later = ("model.lora_rank=8", "engine.strategy=fsdp2", "data.max_token_len_per_gpu=64")
    given = (*lessons.conversations, *later, "optim.lr=1e-2", "trainer.save_freq=after_each_epoch")
    alone = train(lessons, tmp_path / "one", *given, name="sft_trainer_engine")
    assert alone[-1]["val/loss"] < alone[0]["train/loss"]
    assert (tmp_path / "one/global_step_6/actor/lora_adapter").is_dir()
    both = train(lessons, tmp_path / "two", *given, TWO_RANKS, name="sft_trainer_engine")
    assert_same(both, alone)


class TestTorchrun:
    @pytest.mark.slow
    def test_it_is_one_rank(
        self, lessons: Lessons, alone: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        arguments = lessons.overrides(tmp_path, EACH_EPOCH, "trainer.save_freq=4")
        done = lessons.run([*TORCHRUN, CLASSIC], arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_same(lessons.lab.metrics(tmp_path), alone)
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "8"
        # Two ranks wrote the checkpoint; one goes on from it, and has nothing left to do.
        again = train(lessons, tmp_path, "trainer.total_epochs=3")
        assert [row["step"] for row in again] == list(range(1, 13))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("failure", "what"),
        [("raises", "ValueError: negative length"), ("dies", "its process is gone")],
    )
    def test_a_rank_that_fails_is_told(
        self, lessons: Lessons, tmp_path: Path, failure: str, what: str
    ) -> None:
        (tmp_path / "failing.py").write_text(FAILING)
        search_path = f"{lessons.lab.environment['PYTHONPATH']}:{tmp_path}"
        arguments = lessons.overrides(tmp_path / "run", "optim.optimizer_impl=failing")
        done = lessons.run([*TORCHRUN, CLASSIC], arguments, PYTHONPATH=search_path, FAILURE=failure)
        assert done.returncode != 0
        told = done.stderr.partition("caldera: error: ")[2]
        first, second = told.splitlines()[:2]
        assert first == "worker group supervised: rank 1 of 2 failed in train_batch"
        assert second.startswith(f"  {what}")
        assert len(lessons.lab.metrics(tmp_path / "run")) == 2

    @pytest.mark.slow
    def test_a_mistake_is_told_once(self, lessons: Lessons, tmp_path: Path) -> None:
        arguments = lessons.overrides(tmp_path, "data.prompt_key=quest")
        done = lessons.run([*TORCHRUN, CLASSIC], arguments)
        assert done.returncode != 0
        assert done.stderr.count("caldera: error: data.prompt_key='quest'") == 1


class TestCommands:
    def test_caldera_sft_says_what_is_wrong(self, lessons: Lessons, tmp_path: Path) -> None:
        done = lessons.run(["caldera.cli", "sft"], lessons.overrides(tmp_path, "data.trunc=left"))
        assert done.returncode == 2
        assert done.stderr == (
            "caldera: error: unknown config key 'data.trunc'; did you mean data.truncation?\n"
        )

    def test_too_few_rows(self, lessons: Lessons, tmp_path: Path) -> None:
        arguments = lessons.overrides(tmp_path, "data.train_batch_size=64")
        done = lessons.run(["caldera.cli", "sft"], arguments)
        assert done.returncode == 2
        assert done.stderr == (
            "caldera: error: the training set has 32 rows, fewer than one batch of "
            "data.train_batch_size=64\n"
        )

    def test_the_resolved_config(self, lessons: Lessons, tmp_path: Path) -> None:
        done = lessons.run([LATER], [*lessons.overrides(tmp_path), "--cfg", "job"])
        assert done.returncode == 0, done.stderr
        assert "use_dynamic_bsz: true" in done.stdout

    def test_help_of_a_key(self, lessons: Lessons) -> None:
        done = lessons.run([CLASSIC], ["--help", "data.truncation"])
        assert "data.truncation=error  (str)" in done.stdout
