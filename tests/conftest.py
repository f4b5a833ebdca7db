"""A task that a tiny model learns in seconds, and the entry point that trains on it."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
LARGEST = 4  # of the numbers that are added
START_ACCURACY = 0.35  # sampled answers of the warm-started model that are right
EQUAL = (
    "actor/pg_loss", "actor/entropy", "actor/kl_loss", "critic/vf_loss",
    "critic/score/mean", "critic/score/max", "critic/rewards/mean", "response_length/mean",
)  # fmt: skip
"""Metrics that do not depend on where the workers of a run are, or on how many there are."""

LONG_FILES = (
    "e2e/test_learning.py", "e2e/test_algorithms.py", "e2e/test_resume.py",
    "integration/test_docs.py", "integration/test_sharded_engines.py", "integration/test_exact.py",
    "integration/test_served_rewards.py", "integration/test_many_processes.py",
    "ray/test_training.py",
)  # fmt: skip

TIMEOUTS_S = {"unit": 60, "e2e": 600, "megatron": 600, "wheel": 600}
"""How long a test of a suite may take; of all others, `TIMEOUT_S`."""
TIMEOUT_S = 300

PROMPTS, ANSWERS = 25, 16  # of a step, and of each prompt
HOLDING_SCORER = f"""
import time
from pathlib import Path

from caldera.reward_score import arithmetic

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info, go):
    global calls
    calls += 1
    while calls > 2 * {PROMPTS * ANSWERS} and not Path(go).exists():
        time.sleep(0.02)
    return arithmetic.compute_score(solution_str, ground_truth)
"""
"""Scores as ever; in the third step of a run it waits for a file."""


class WarmPython:
    """Runs modules in processes of their own that have imported everything already."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))  # the path of a socket must be short

    def command(self, module: str, *arguments: str) -> list[str]:
        """Stands for `python -m MODULE ARGUMENTS`."""
        return [*self._python(), "-m", module, *arguments]

    def programs(self) -> str:
        """A folder for PATH, where `python3 -m MODULE` and `caldera` have imported everything."""
        folder = self._folder / "programs"
        if not folder.exists():
            folder.mkdir()
            warm = shlex.join(self._python())
            programs = {
                "python3": f'[ "$1" = -m ] && exec {warm} "$@"\nexec {sys.executable} "$@"\n',
                "caldera": f'exec {warm} -m caldera.cli "$@"\n',
            }
            for name, script in programs.items():
                (folder / name).write_text(f"#!/bin/sh\n{script}")
                (folder / name).chmod(0o700)
        return str(folder)

    def _python(self) -> list[str]:
        if not hasattr(os, "pidfd_open"):  # which the server needs, and some Pythons lack
            return [sys.executable]
        here, address = Path(__file__).parent, self._folder / "socket"
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, here / "warm_server.py", address], env=self.environment,
                stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            while not address.exists():
                assert self._server.poll() is None, "the server could not start"
                time.sleep(0.01)
        assert self._server.poll() is None, "the server has ended, and its processes with it"
        return [sys.executable, "-I", "-S", str(here / "warm_client.py"), str(address)]

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait()
        shutil.rmtree(self._folder)


@dataclass(frozen=True)
class Lab:
    """A warm-started model with its data, and training runs on them."""

    folder: Path
    environment: dict[str, str]
    warm: WarmPython

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def train_file(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def test_file(self) -> Path:
        return self.folder / "test.parquet"

    def overrides(self, run_dir: Path, *more: str) -> list[str]:
        """The arguments of a GRPO run; those in `more` win."""
        return [
            f"data.train_files={self.train_file}",
            f"data.val_files={self.test_file}",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=6",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "actor_rollout_ref.actor.ppo_mini_batch_size=5",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=512",
            "actor_rollout_ref.actor.optim.lr=5e-4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=512",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=512",
            f"actor_rollout_ref.rollout.n={ANSWERS}",
            "critic.model.enable_gradient_checkpointing=False",
            "critic.ppo_micro_batch_size_per_gpu=512",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            "trainer.logger=[file]",
            "trainer.val_before_train=False",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    @property
    def descent(self) -> tuple[str, ...]:
        """The arguments of gradient descent, for runs whose numbers are compared.

        Adam makes large steps of gradients that are nothing but rounding, and on some processors
        they are seen in the next losses.
        """
        settings = ("optimizer=SGD", "lr=0.01", "override_optimizer_config.momentum=0.9")
        roles = ("actor_rollout_ref.actor", "critic")
        return tuple(f"{role}.optim.{setting}" for role in roles for setting in settings)

    def holding(self, go: Path) -> tuple[str, ...]:
        """The arguments of a run that stays in its third step until the file `go` is there."""
        scorer = self.folder / "holding.py"
        scorer.write_text(HOLDING_SCORER)
        function = "custom_reward_function"
        # The controller scores, which has seen the answers of all ranks.
        return (
            f"{function}.path={scorer}", f"{function}.reward_kwargs.go={go}",
            "reward.streaming=False",
        )  # fmt: skip

    def start(self, arguments: list[str], **options: Any) -> subprocess.Popen[str]:
        """The entry point in a process of its own."""
        command = [sys.executable, "-m", "caldera.trainer.main_ppo", *arguments]
        return subprocess.Popen(command, env=self.environment, text=True, **options)

    def run(
        self, arguments: list[str], module: str = "caldera.trainer.main_ppo", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """An entry point in a process of its own, to its end."""
        return subprocess.run(
            self.warm.command(module, *arguments), env=self.environment | environment, text=True,
            capture_output=True, check=False, timeout=600,
        )  # fmt: skip

    def train(self, run_dir: Path, *more: str) -> list[dict[str, Any]]:
        """A run that must succeed; returns its metrics."""
        done = self.run(self.overrides(run_dir, *more))
        assert done.returncode == 0, done.stdout + done.stderr
        return self.metrics(run_dir)

    def metrics(self, run_dir: Path) -> list[dict[str, Any]]:
        """What metrics.jsonl says of each step, the step's number included."""
        steps: dict[int, dict[str, Any]] = {}
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            steps.setdefault(row["step"], {"step": row["step"]}).update(row["data"])
        return list(steps.values())

    @staticmethod
    def processes_of(session: int) -> dict[int, int]:
        """Process id -> parent, of every living process of a session."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it ended in between
                continue
            if int(its_session) == session and state != "Z":
                found[int(stat.parent.name)] = int(parent)
        return found

    @staticmethod
    def assert_same(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
        """Two runs of the same config have the same losses and rewards at each step.

        It takes `descent`, so that rounding stays what it is.
        """
        assert [row["step"] for row in ours] == [row["step"] for row in reference]
        for one, other in zip(ours, reference, strict=True):
            expected = {key: other[key] for key in EQUAL if key in other}
            found = {key: one[key] for key in EQUAL if key in one}
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes come first: begun last, one would be left to one core."""
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))
    if config.getoption("timeout") is None:
        for item in items:
            suite = item.path.relative_to(REPOSITORY / "tests").parts[0]
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S.get(suite, TIMEOUT_S)))


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Entry points that run in this process set the level of the log: for their test alone."""
    logger = logging.getLogger("caldera")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    others = ("CALDERA_", "RAY_ADDRESS", "VERL_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY / "src"),
    }
    python = WarmPython(environment)
    yield python
    python.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython) -> Lab:
    """Sums of two small numbers: there are 25, all of them to train on and to validate with."""
    from caldera.demo.arithmetic import build_tokenizer, write_parquet

    folder = tmp_path_factory.mktemp("lab")
    numbers = range(LARGEST + 1)
    problems = [(f"{a}+{b}", str(a + b)) for a in numbers for b in numbers]
    random.Random(0).shuffle(problems)
    write_parquet(problems, "train", folder / "train.parquet")
    write_parquet(problems, "test", folder / "test.parquet")
    tokenizer = build_tokenizer()
    shutil.copytree(_warm_started_model(tokenizer, problems), folder / "model")
    tokenizer.save_pretrained(folder / "model")
    environment = warm.environment | {"CALDERA_CACHE": str(folder / "cache")}
    return Lab(folder, environment, warm)


@dataclass(frozen=True)
class Lessons:
    """Sums with their answers, and as conversations, for supervised runs on the lab's model."""

    lab: Lab
    folder: Path

    def overrides(self, run_dir: Path, *more: str) -> list[str]:
        """The arguments of a run; those in `more` win."""
        return [
            f"data.train_files={self.folder / 'train.parquet'}",
            f"data.val_files={self.folder / 'test.parquet'}",
            "data.train_batch_size=8",
            "data.micro_batch_size_per_gpu=3",
            "data.max_length=16",
            f"model.partial_pretrain={self.lab.model}",
            "model.enable_gradient_checkpointing=False",
            "optim.lr=2e-3",
            "trainer.device=cpu",
            "trainer.logger=[file]",
            "trainer.total_epochs=2",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    @property
    def conversations(self) -> list[str]:
        """More arguments: several sums in a row, in a chat template that tells who speaks."""
        return [
            f"data.train_files={self.folder / 'talks.parquet'}",
            f"data.val_files={self.folder / 'talks.parquet'}",
            "data.max_length=32",
            f"model.tokenizer_path={self.folder / 'tokenizer'}",
        ]

    def run(
        self, command: list[str], arguments: list[str], **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command in a process of its own, to its end."""
        return self.lab.run([*command[1:], *arguments], command[0], **environment)


@pytest.fixture(scope="session")
def lessons(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lessons:
    import pyarrow
    import pyarrow.parquet

    from caldera.demo.arithmetic import build_tokenizer

    folder = tmp_path_factory.mktemp("lessons")
    sums = [(f"{a}+{b}", str(a + b)) for a in range(7) for b in range(7)]
    random.Random(1).shuffle(sums)
    rows = [{"question": question, "answer": answer} for question, answer in sums]
    talks = [
        [
            {"role": role, "content": text}
            for pair in sums[start : start + 1 + start % 3]
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        for start in range(24)
    ]
    files = {"train": rows[:32], "test": rows[32:], "talks": [{"messages": t} for t in talks]}
    for name, content in files.items():
        table = pyarrow.Table.from_pylist(content)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}"
        "{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    return Lessons(lab, folder)


@pytest.fixture(scope="session")
def reward_model(lab: Lab) -> tuple[str, ...]:
    """The arguments of a reward model: a classifier on the lab's model, with a head of its own."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = lab.folder / "reward_model"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForSequenceClassification.from_pretrained(lab.model, num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(lab.model).save_pretrained(folder)
    return (
        "reward_model.enable=True",
        f"reward_model.model.path={folder}",
        "reward_model.micro_batch_size_per_gpu=512",
    )


@pytest.fixture(scope="session")
def all_roles(lab: Lab, reward_model: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments of PPO with a critic, a reference and a reward model, for `assert_same`."""
    return (
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=True",
        *lab.descent,
        *reward_model,
    )


def _warm_started_model(tokenizer: Any, problems: list[tuple[str, str]]) -> Path:
    """The folder of the model, which is trained once for all sessions, until its recipe changes."""
    import torch
    import transformers

    recipe = [inspect.getsource(_save_warm_started_model), str(START_ACCURACY), str(problems)]
    recipe += [
        json.dumps(tokenizer.get_vocab(), sort_keys=True),
        torch.__version__,
        transformers.__version__,
    ]
    name = hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]
    folder = REPOSITORY / ".pytest_cache" / "models" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent))
        _save_warm_started_model(tokenizer, problems, aside)
        try:
            aside.rename(folder)
        except OSError:  # another process of the suite was first
            shutil.rmtree(aside)
    return folder


def _save_warm_started_model(tokenizer: Any, problems: list[tuple[str, str]], folder: Path) -> None:
    """Train on the answers until they are sampled with the probability START_ACCURACY."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    texts = [f"{tokenizer.bos_token}{q}={a}{tokenizer.eos_token}" for q, a in problems]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    of_answer = (ids != tokenizer.pad_token_id)[:, 1:]  # (B, T - 1)
    of_answer[:, : len("a+b=")] = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(500):
        log_probs = model(ids).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
        chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1) * of_answer
        if chosen.sum(-1).exp().mean() >= START_ACCURACY:
            break
        optimizer.zero_grad()
        (-chosen.sum() / of_answer.sum()).backward()
        optimizer.step()
    else:
        raise AssertionError(f"no warm start to an accuracy of {START_ACCURACY}")
    model.save_pretrained(folder)
