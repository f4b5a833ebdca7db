"""The Python API: runs on data, rewards, tools and callbacks in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import caldera
from caldera.data.importing import load_object
from caldera.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tests.conftest import Lab

NUMBERS = range(5)
SUMS = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in NUMBERS for b in NUMBERS]
SMALL: dict[str, Any] = {
    "n": 4,
    "lr": 5e-4,
    "steps": 2,
    "batch_size": 5,
    "mini_batch_size": 5,
    "max_prompt_length": 6,
    "max_response_length": 4,
    "device": "cpu",
}


def right(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def test_ten_lines_train_report_and_sample(lab: Lab, tmp_path: Path) -> None:
    seen: list[int] = []
    run = caldera.grpo(
        lab.model,
        SUMS,
        right,
        eval_dataset=SUMS[:10],
        output=tmp_path,
        callbacks=[lambda step, metrics: seen.append(step)],
        **SMALL,
    )
    assert "not trained yet" in repr(run) and "not trained yet" in run._repr_html_()
    with pytest.raises(CheckpointError, match=r"train\(\) the run first"):
        run.generate(["1+1"])
    assert run.train() is run
    assert seen == [1, 2], "callbacks are the objects themselves, not copies"
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert 0 <= run.metrics[-1]["val-core/data/acc/mean@1"] <= 1
    assert "<svg" in run._repr_html_() and run.report().read_text().startswith("<!")
    responses = run.generate(["1+1", "2+1"], temperature=0)
    assert len(responses) == 2 and all(isinstance(text, str) for text in responses)
    assert [len(texts) for texts in run.generate(["1+1"], n=3)] == [3]
    assert sum(p.numel() for p in run.model.parameters()) > 0
    score = run.evaluate(SUMS[:10])["val-core/data/acc/mean@1"]
    assert score == run.metrics[-1]["val-core/data/acc/mean@1"], "the same model, greedily"


def test_the_same_run_as_the_command(lab: Lab, tmp_path: Path) -> None:
    """Python has no path of its own: metrics and weights are those of `caldera train`."""
    run = caldera.grpo(lab.model, lab.train_file, output=tmp_path / "api", **SMALL).train()
    keys = ("data.train_batch_size=5", "actor_rollout_ref.rollout.n=4", "data.max_prompt_length=6")
    lab.train(
        tmp_path / "command",
        *keys,
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    )
    other = lab.metrics(tmp_path / "command")
    timed = ("timing", "perf", "training/")
    for one, two in zip(run.metrics, other, strict=True):
        same = {key: value for key, value in one.items() if not key.startswith(timed)}
        assert same == {key: two[key] for key in same}


def test_trls_quickstart_with_other_names(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`GRPOTrainer(model=, reward_funcs=, train_dataset=)`, its reward unchanged."""
    dataset = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS]
    lengths: list[int] = []

    def reward_num_unique_chars(completions: Any, **kwargs: Any) -> list[float]:
        lengths.append(len(completions))
        return [float(len(set(c[0]["content"]))) for c in completions]

    trainer = caldera.grpo(
        model=str(lab.model),
        reward=reward_num_unique_chars,
        dataset=dataset,
        output=tmp_path,
        **SMALL,
    )
    trainer.train()
    assert lengths == [20, 20], "a whole batch a call"
    assert trainer.metrics[-1]["critic/score/mean"] > 0
    assert "ground_truth" not in caplog.text, "no row has one, so none is missing"


def test_several_rewards_callbacks_that_stop_and_resuming(lab: Lab, tmp_path: Path) -> None:
    async def brief(response: str) -> float:
        return -float(len(response))

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            raise caldera.StopTraining("enough")

    arguments = SMALL | {"steps": 3}
    run = caldera.grpo(
        lab.model, SUMS, [right, brief], reward_weights=[1, 0.1], output=tmp_path,
        callbacks=[stop], **arguments,
    ).train()  # fmt: skip
    (row,) = run.metrics
    score = row["reward/right/mean"] + 0.1 * row["reward/brief/mean"]
    assert row["critic/score/mean"] == pytest.approx(score, abs=1e-6)
    assert "global_step_1" in str(run.model_path), "the step that stopped is saved"
    again = caldera.grpo(lab.model, SUMS, right, output=tmp_path, **arguments).train()
    assert [row["step"] for row in again.metrics] == [1, 2, 3]


SCRIPT = """
import caldera

def right(response, answer):
    return float(response.strip() == answer)

rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
run = caldera.grpo("MODEL", rows, right, n=4, steps=1, batch_size=6, mini_batch_size=6,
                   max_prompt_length=6, max_response_length=4, processes=2, output="run")
print(run.train().metrics[-1]["critic/score/mean"])
"""


def test_a_plain_script_over_two_processes(lab: Lab, tmp_path: Path) -> None:
    """Without `if __name__ == "__main__"`, and with a reward of its own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("MODEL", str(lab.model)))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=lab.environment, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("chosen for this machine") == 1, "it ran once"
    assert 0 <= float(done.stdout.split()[-1]) <= 1


def test_supervised_trainings(lab: Lab, tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 1, "batch_size": 4, "max_length": 16, "device": "cpu"}
    pairs = [{"prompt": row["prompt"], "completion": row["answer"]} for row in SUMS]
    run = caldera.sft(lab.model, pairs, eval_dataset=pairs[:4], output=tmp_path / "sft", **small)
    assert run.train().metrics[-1]["val/loss"] > 0
    assert run.generate(["1+1"], max_prompt_length=6, max_response_length=4) != []
    preferred = [
        {**row, "chosen": row["answer"], "rejected": "0"} for row in SUMS if row["answer"] != "0"
    ]
    other = caldera.dpo(lab.model, preferred, beta=0.2, output=tmp_path / "dpo", **small)
    assert other.config.dpo.beta == 0.2
    assert other.train().metrics[-1]["train/loss"] > 0


def test_ppo_has_a_critic(lab: Lab, tmp_path: Path) -> None:
    arguments = SMALL | {"n": 1}
    run = caldera.ppo(lab.model, SUMS, right, critic_lr=1e-3, output=tmp_path, **arguments)
    assert "critic/vf_loss" in run.train().metrics[-1]


def test_tools_and_environments_as_objects(lab: Lab, tmp_path: Path) -> None:
    from caldera.interactions.base import BaseInteraction, Message

    class Teacher(BaseInteraction):
        async def generate_response(
            self, instance_id: str, messages: Sequence[Message], **kwargs: Any
        ) -> tuple[bool, str, float, dict[str, Any]]:
            return True, "", 0.5, {}

    run = caldera.grpo(
        lab.model, SUMS, right, environment=Teacher, output=tmp_path / "teacher",
        **SMALL | {"max_response_length": 12},
    )  # fmt: skip
    assert run.train().metrics[-1]["num_turns/mean"] >= 2

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    run = caldera.grpo(
        lab.model, SUMS, right, tools=[add], output=tmp_path / "tools",
        **SMALL | {"max_prompt_length": 400},
    )  # fmt: skip
    path = run.config.actor_rollout_ref.rollout.multi_turn.function_tool_path
    run._files.write(run.folder)
    assert load_object(path, "tool_0", "tools") is add


def test_mistakes_are_told_before_anything_is_written(lab: Lab, tmp_path: Path) -> None:
    def make(**keys: Any) -> Any:
        return caldera.grpo(lab.model, SUMS, output=tmp_path / "run", **keys)

    with pytest.raises(ConfigError, match="unknown keyword 'stepz'"):
        make(stepz=3)
    with pytest.raises(ConfigError, match="environment=3: takes a class"):
        make(environment=3)
    with pytest.raises(ConfigError, match="reward=3: takes a function"):
        make(reward=3)
    with pytest.raises(ConfigError, match=r"callbacks\[0\]=3"):
        make(callbacks=[3])
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        lock = __import__("threading").Lock()
        make(reward=lambda response: float(lock.locked())).train()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not any((tmp_path / "run").glob("global_step_*"))
