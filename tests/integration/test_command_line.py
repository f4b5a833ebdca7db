"""The command line that users of verl know, and everything that a run leaves behind."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from caldera.config import SHORT_PROFILE, known_keys, load_config
from caldera.engine.checkpoints import read_whole
from caldera.trainer.main_ppo import main

if TYPE_CHECKING:
    from tests.conftest import Lab

PROMPT, RESPONSE = 6, 4
SAMPLES = 16  # of a step
STATISTICS = ("mean", "max", "min")
METRICS = {
    *(
        f"critic/{what}/{statistic}"
        for what in ("score", "rewards", "advantages", "returns", "values")
        for statistic in STATISTICS
    ),
    "critic/vf_explained_var",
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")),
    *(f"actor/{name}" for name in ("entropy", "pg_loss", "pg_clipfrac", "pg_clipfrac_lower")),
    *(f"actor/{name}" for name in ("ppo_kl", "grad_norm", "lr")),
    *(f"perf/{name}" for name in ("total_num_tokens", "time_per_step", "throughput")),
    *(
        f"{what}/{statistic}"
        for what in ("prompt_length", "response_length", "response_length_non_aborted")
        for statistic in (*STATISTICS, "clip_ratio")
    ),
    "response/aborted_ratio",
    *(
        f"timing_s/{phase}"
        for phase in (
            "step", "gen", "reward", "old_log_prob", "values", "adv", "update_critic",
            "update_actor", "update_weights",
        )
    ),
    *(
        f"timing_per_token_ms/{phase}"
        for phase in ("gen", "values", "adv", "update_critic", "update_actor")
    ),
    "training/global_step",
    "training/epoch",
    *(f"training/rollout_probs_diff_{name}" for name in ("valid", "max", "mean", "std")),
    "training/rollout_actor_probs_pearson_corr",
}  # fmt: skip
KL_METRICS = {
    *(f"actor/{name}" for name in ("kl_loss", "kl_coef")),
    *(f"actor/{name}" for name in ("reward_kl_penalty", "reward_kl_penalty_coeff")),
    "timing_s/ref",
    "timing_per_token_ms/ref",
}
ACCURACY = "val-core/caldera/arithmetic/acc/mean@1"


def ppo_arguments(lab: Lab) -> list[str]:
    """A PPO command as verl's users write it, with small sizes."""
    return [
        f"data.train_files={lab.train_file}",
        f"data.val_files={lab.test_file}",
        "data.train_batch_size=16",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        f"actor_rollout_ref.model.path={lab.model}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-5",
        f"critic.model.path={lab.model}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=console",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
        "trainer.total_epochs=3",
    ]


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """The entry point sets logging up for its process, which here is the tests'."""
    root, own = logging.getLogger(), logging.getLogger("caldera")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.fixture(scope="module")
def run(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of PPO with everything on that leaves something behind."""
    folder = tmp_path_factory.mktemp("command_line") / "run"
    done = lab.run(
        [
            *ppo_arguments(lab),
            "algorithm.use_kl_in_reward=True",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "trainer.logger=[console,file]",
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
            "trainer.test_freq=1",
            f"trainer.default_local_dir={folder}",
            f"trainer.rollout_data_dir={folder / 'rollouts'}",
            f"trainer.validation_data_dir={folder / 'validations'}",
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_ppo_command_runs_as_it_is(lab: Lab, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    arguments = [*ppo_arguments(lab), "trainer.console_metrics=all"]
    with lab.start(arguments, cwd=tmp_path, **options) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    steps: dict[str, set[str]] = {}
    for line in output.splitlines():
        if line.startswith("step:"):
            step, *metrics = line.split(" - ")
            steps.setdefault(step, set()).update(item.rsplit(":", 1)[0] for item in metrics)
    assert list(steps) == ["step:1", "step:2", "step:3"]
    assert all(names >= METRICS for names in steps.values())
    # Frequencies beyond the end of the run still count its last step.
    assert [ACCURACY in names for names in steps.values()] == [False, False, True]
    checkpoints = list((tmp_path / "checkpoints").rglob("global_step_*"))
    assert [path.name for path in checkpoints] == ["global_step_3"]


def test_metrics(lab: Lab, run: Path) -> None:
    rows = lab.metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row.keys() >= METRICS | KL_METRICS
        assert row.keys() >= {ACCURACY, "timing_s/testing", "timing_s/save_checkpoint"}
        assert row["training/global_step"] == row["step"]
        assert row["training/epoch"] == row["step"] - 1  # 25 rows hold one batch of 16
        assert row["prompt_length/mean"] == 5  # <bos> and "a+b="
        assert row["actor/lr"] == pytest.approx(1e-6)
        assert row["critic/lr"] == pytest.approx(1e-5)
        assert row["actor/kl_coef"] == row["actor/reward_kl_penalty_coeff"] == 0.001
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_dumps(lab: Lab, run: Path) -> None:
    for folder, samples in (("rollouts", SAMPLES), ("validations", 25)):
        assert {path.name for path in (run / folder).iterdir()} == {"1.jsonl", "2.jsonl"}
        for step in (1, 2):
            lines = (run / folder / f"{step}.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            assert len(rows) == samples
            for row in rows:
                assert row.keys() >= {"input", "output", "gts", "score", "step", "acc", "uid"}
                first, second = row["input"].rstrip("=").split("+")
                assert row["gts"] == str(int(first) + int(second))
                assert row["score"] == row["acc"] == float(row["output"] == row["gts"])
                assert row["step"] == step
    scores = [json.loads(line)["score"] for line in lines]
    assert lab.metrics(run)[-1][ACCURACY] == pytest.approx(sum(scores) / len(scores))


def test_checkpoint_layout(run: Path) -> None:
    assert (run / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    for step in (1, 2):
        checkpoint = run / f"global_step_{step}"
        assert isinstance(torch.load(checkpoint / "data.pt"), dict)
        for role in ("actor", "critic"):
            names = {path.name for path in (checkpoint / role).iterdir()}
            assert names == {
                "dist_ckpt",
                "extra_state_world_size_1_rank_0.pt",
                "huggingface",
            }
            extra = torch.load(
                checkpoint / role / "extra_state_world_size_1_rank_0.pt", weights_only=False
            )
            assert extra.keys() >= {"lr_scheduler", "rng"}
            files = {path.name for path in (checkpoint / role / "huggingface").iterdir()}
            assert files >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
        assert (checkpoint / "actor/huggingface/generation_config.json").is_file()


def test_the_saved_model_answers_in_transformers(lab: Lab, run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "global_step_2/actor/huggingface"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    saved = dict(read_whole(run / "global_step_2/actor"))
    loaded = model.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)

    lines = (run / "validations/2.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):  # which the run itself answered greedily
        question = row["input"].removesuffix("=")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**prompt, max_new_tokens=RESPONSE, do_sample=False)
        answer = ids[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == row["output"]


def test_the_resolved_config_is_kept_and_can_be_printed(
    lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cfg", "job", *ppo_arguments(lab)]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["train_batch_size"] == 16
    assert printed["critic"]["ppo_mini_batch_size"] == 4  # follows the actor's
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert kept.keys() == printed.keys()
    assert kept["actor_rollout_ref"]["rollout"]["name"] == "native"


def test_help_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: caldera train")
    missing = [key for key in known_keys() if f"  {key}=" not in shown]
    assert missing == []
    often = shown.partition("Keys that most runs set:")[2].partition("other keys:")[0]
    assert all(f"  {key}=" in often for key in SHORT_PROFILE)
    assert 35 <= len(SHORT_PROFILE) <= 45
    assert "Takes false alone: prompts are computed once a sample." in shown


def test_help_of_a_group_or_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "algorithm.kl_ctrl"]) == 0
    assert "algorithm.kl_ctrl.target_kl=0.1  (float)" in capsys.readouterr().out
    assert main(["--help", "train_batch_size"]) == 0
    shown = capsys.readouterr().out
    assert "data.train_batch_size=null  (int or null, prompts)" in shown
    assert "algorithm" not in shown
    assert main(["--help", "no.such.key"]) == 0
    assert "no key 'no.such.key'" in capsys.readouterr().out


def test_the_short_profile_is_a_config_file(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `--cfg short` prints loads again, and says the same."""
    arguments = lab.overrides(tmp_path / "run")
    assert main(["--cfg", "short", *arguments]) == 0
    text = capsys.readouterr().out
    assert "# int or null, prompts, default null. Prompts per training step;" in text
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{text}")
    mine = load_config([], "mine", str(tmp_path))
    plain = load_config(arguments)
    assert mine.data == plain.data
    assert mine.trainer.default_local_dir == plain.trainer.default_local_dir


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["critic.ppo_epochs=0"], "critic.ppo_epochs=0: must be at least 1"),
        (
            ["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"],
            "actor_rollout_ref.rollout.n=1: algorithm.adv_estimator='rloo' compares",
        ),
    ],
)
def test_the_short_profile_is_checked_as_a_run_is(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str], told: str
) -> None:
    assert main(["--cfg", "short", *lab.overrides(tmp_path), *keys]) == 2
    shown = capsys.readouterr()
    assert "train_batch_size: " in shown.out
    assert told in shown.err


def test_sampling_with_transformers(lab: Lab, tmp_path: Path) -> None:
    arguments = lab.overrides(
        tmp_path, "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1"
    )
    assert main(arguments) == 0
    (row,) = lab.metrics(tmp_path)
    assert row["training/rollout_probs_diff_max"] < 1e-4
    assert row["critic/score/mean"] > 0.1


def test_the_split_into_micro_batches_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    def metrics(samples: int) -> list[dict[str, Any]]:
        run_dir = tmp_path / str(samples)
        arguments = [
            *ppo_arguments(lab),
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={samples}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={samples}",
            f"critic.ppo_micro_batch_size_per_gpu={samples}",
            "trainer.device=cpu",
            "trainer.logger=file",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={run_dir}",
        ]
        assert main(arguments) == 0
        return lab.metrics(run_dir)

    whole, split = metrics(16), metrics(3)  # the last micro-batch has one sample
    assert len(whole) == len(split) == 2
    for one, other in zip(whole, split, strict=True):
        compared = {name for name in one if not name.startswith(("timing_", "perf/"))}
        assert {"actor/pg_loss", "actor/grad_norm", "critic/vf_loss"} <= compared
        for name in compared:
            assert other[name] == pytest.approx(one[name], rel=0, abs=1e-5), name
