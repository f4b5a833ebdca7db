"""`caldera migrate`: what it tells of a launch script, and the equivalent it gives."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from caldera.cli import main
from caldera.config import load_config

SCRIPT = """\
#!/usr/bin/env bash
set -x
export WANDB_MODE=offline
data=$HOME/data
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    --config-path=config --config-name='ppo_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['$data/train.parquet']" \\
    data.val_files=/d/test.parquet data.train_batch_size=64 \\
    data.max_prompt_length=512 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    critic.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.n=8 \\
    +reward.custom_reward_function.path=score.py \\
    {more} 2>&1 | tee log
"""


@pytest.fixture(autouse=True)
def _plain_logging() -> Any:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers


def migrated(tmp_path: Path, capsys: Any, text: str, *options: str) -> tuple[int, str]:
    script = tmp_path / "run.sh"
    script.write_text(text)
    status = main(["migrate", str(script), *options])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def section(text: str, title: str) -> list[str]:
    """The lines under a title."""
    _, _, after = text.partition(f"\n{title}\n")
    return [line.strip() for line in after.partition("\n\n")[0].splitlines()]


def test_a_script_that_runs(tmp_path: Path, capsys: Any) -> None:
    status, told = migrated(tmp_path, capsys, SCRIPT.format(more=""))
    assert status == 0
    assert f"{tmp_path}/run.sh:5: verl.trainer.main_ppo, 13 arguments" in told
    assert section(told, "Renamed") == [
        "reward.custom_reward_function.path -> custom_reward_function.path"
    ]
    assert section(told, "Left out below, since the defaults say the same") == [
        "data.max_prompt_length=512",
        "critic.ppo_mini_batch_size=32",
    ]
    assert "Refused" not in told and "Still to settle" not in told
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size: 2 in verl, here 1" in section(
        told, "Defaults that differ"
    )
    assert section(told, "The same here") == [
        "export WANDB_MODE=offline",
        "export PYTHONUNBUFFERED=1",
        "caldera train \\",
        "algorithm.adv_estimator=grpo \\",
        "\"data.train_files=['$HOME/data/train.parquet']\" \\",
        "data.val_files=/d/test.parquet \\",
        "data.train_batch_size=64 \\",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \\",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32 \\",
        "actor_rollout_ref.actor.use_dynamic_bsz=True \\",
        "actor_rollout_ref.rollout.n=8 \\",
        "custom_reward_function.path=score.py",
    ]


def test_one_response_a_prompt_for_grpo_is_still_to_settle(tmp_path: Path, capsys: Any) -> None:
    text = SCRIPT.format(more="actor_rollout_ref.rollout.n=1")
    status, told = migrated(tmp_path, capsys, text)
    assert status == 1
    (line,) = section(told, "Still to settle")
    assert "actor_rollout_ref.rollout.n=1: algorithm.adv_estimator='grpo' compares" in line


def test_the_equivalent_means_the_same(tmp_path: Path, capsys: Any) -> None:
    """Every key of the script and the few of the equivalent give one config."""
    text = SCRIPT.format(more="").replace("$HOME", "/home")
    _, told = migrated(tmp_path, capsys, text)
    lines = section(told, "The same here")
    command = " ".join(line.rstrip("\\") for line in lines if not line.startswith("export"))
    short = load_config(shlex.split(command)[2:])
    body = text.partition("ppo_trainer.yaml'")[2].partition("2>&1")[0].replace("\\\n", " ")
    whole = load_config(shlex.split(body.replace("$data", "/home/data")))
    assert short == whole


def test_what_cannot_be_taken(tmp_path: Path, capsys: Any) -> None:
    more = "data.tran_batch_size=3 algorithm.kl_penalty=far actor_rollout_ref.rollout.n=many"
    more += " actor_rollout_ref.model.use_shm=True"
    more += " data.val_batch_size=$(nproc) actor_rollout_ref.rollout.name=trtllm"
    status, told = migrated(tmp_path, capsys, SCRIPT.format(more=more))
    assert status == 1
    refused = section(told, "Refused, and left out below")
    assert len(refused) == 5
    assert (
        "unknown config key 'data.tran_batch_size'; did you mean data.train_batch_size?" in refused
    )
    assert any(line.startswith("algorithm.kl_penalty='far': takes one of") for line in refused)
    assert any(line.startswith("actor_rollout_ref.rollout.n='many': takes") for line in refused)
    assert any(line.startswith("actor_rollout_ref.rollout.name='trtllm'") for line in refused)
    same = " ".join(section(told, "The same here"))
    assert "use_shm" not in same and "trtllm" not in same
    assert '"data.val_batch_size=$(nproc)"' in same


OWN_FILE = """\
set -x
HERE="$(pwd)"
python3 -m verl.trainer.main_ppo --config-path="$HERE/configs" --config-name='multiturn' \\
    critic.optim.lr='${actor_rollout_ref.actor.optim.lr}' data.train_batch_size=$((N * 8)) \\
    trainer.experiment_name=$(basename $HERE)-grpo model_engine=dp $@
"""
THEIR_YAML = """\
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data: {train_files: a.parquet, val_files: b.parquet}
actor_rollout_ref:
  model: {path: m}
  actor: {use_dynamic_bsz: true}
  rollout: {multi_turn: {max_assistant_turns: 5}}
"""


def test_a_config_file_of_the_scripts_own(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read where it is here; else the keys are looked at without it."""
    monkeypatch.chdir(tmp_path)
    status, told = migrated(tmp_path, capsys, OWN_FILE)
    assert status == 1 and "Refused" not in told
    assert section(told, "Still to settle")[0] == (
        f"--config-name=multiturn: there is no such file in {tmp_path}/configs; the keys were read "
        "as if it were ppo_trainer.yaml"
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/multiturn.yaml").write_text(THEIR_YAML)
    status, told = migrated(tmp_path, capsys, OWN_FILE)
    assert status == 0, told
    assert section(told, "The same here") == [
        'HERE="$(pwd)"',
        "caldera train \\",
        '"--config-path=$(pwd)/configs" \\',
        "--config-name=multiturn \\",
        "'critic.optim.lr=${actor_rollout_ref.actor.optim.lr}' \\",
        '"data.train_batch_size=$((${N} * 8))" \\',
        '"trainer.experiment_name=$(basename $HERE)-grpo" \\',
        "model_engine=dp",
    ]


def test_values_of_a_config_file_are_hydras(tmp_path: Path, capsys: Any) -> None:
    """Its grammar is not quite YAML's; what chooses files stays on the command line."""
    output = tmp_path / "mine.yaml"
    more = "'+actor_rollout_ref.rollout.engine_kwargs.vllm={a:1,b:[x]}' model_engine=dp"
    more += " actor_rollout_ref.rollout.name=vllm critic.optim.lr='${critic.optim.clip_grad}'"
    _, told = migrated(tmp_path, capsys, SCRIPT.format(more=more), "--output", str(output))
    written = yaml.safe_load(output.read_text())
    assert written["actor_rollout_ref"]["rollout"]["engine_kwargs"] == {
        "vllm": {"a": 1, "b": ["x"]}
    }
    assert written["critic"]["optim"]["lr"] == "${critic.optim.clip_grad}"
    assert section(told, "The same here")[-1] == "model_engine=dp"


def test_what_is_missing_is_told(tmp_path: Path, capsys: Any) -> None:
    text = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    status, told = migrated(tmp_path, capsys, text)
    assert status == 1
    assert "is required" in section(told, "Still to settle")[0]


def test_a_config_file(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "configs" / "mine.yaml"
    status, told = migrated(tmp_path, capsys, SCRIPT.format(more=""), "--output", str(output))
    assert status == 0
    assert yaml.safe_load(output.read_text())["data"] == {
        "val_files": "/d/test.parquet",
        "train_batch_size": 64,
    }
    assert section(told, "The same here")[2:] == [
        "caldera train \\",
        f"--config-path={output.parent} \\",
        "--config-name=mine \\",
        "\"data.train_files=['$HOME/data/train.parquet']\"",
    ]
    config = load_config(["data.train_files=x"], "mine", str(output.parent))
    assert config.data.train_batch_size == 64 and config.algorithm.adv_estimator == "grpo"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer "
            "data.train_files=a data.val_files=b model.partial_pretrain=m data.messages_key=x",
            ["torchrun --nproc_per_node=8 -m caldera.trainer.fsdp_sft_trainer \\",
             "data.train_files=a \\", "data.val_files=b \\", "model.partial_pretrain=m \\",
             "data.multiturn.messages_key=x"],
        ),
        (
            "python3 -m verl.trainer.main_eval data.path=out.parquet",
            ["caldera eval \\", "data.path=out.parquet"],
        ),
        (
            "python3 -m verl.model_merger merge --backend fsdp --local_dir a --target_dir b",
            ["caldera merge merge --backend fsdp --local_dir a --target_dir b"],
        ),
        (
            "python3 -m verl.trainer.main_generation_server +data.output_path=o.parquet",
            ["python3 -m caldera.trainer.main_generation_server +data.output_path=o.parquet"],
        ),
        (
            "ray job submit --no-wait -- python3 -m verl.trainer.main_generation model.path=m "
            "data.path=p data.output_path=o.parquet",
            ["ray job submit --no-wait -- caldera generate \\", "model.path=m \\",
             "data.path=p \\", "data.output_path=o.parquet"],
        ),
    ],
)  # fmt: skip
def test_other_commands(tmp_path: Path, capsys: Any, text: str, command: list[str]) -> None:
    status, told = migrated(tmp_path, capsys, text)
    assert section(told, "The same here") == command
    assert status == 0, told


@pytest.mark.parametrize("name", ["mine", "mine.yml", "there.yaml"])
def test_outputs_that_cannot_be_written(tmp_path: Path, capsys: Any, name: str) -> None:
    (tmp_path / "there.yaml").write_text("as it was")
    output = tmp_path / name
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(more=""))
    assert main(["migrate", str(script), "--output", str(output)]) == 2
    told = "exists already" if output.exists() else "ends in .yaml"
    assert told in capsys.readouterr().err
    assert (tmp_path / "there.yaml").read_text() == "as it was"


def test_no_command_of_verls(tmp_path: Path, capsys: Any) -> None:
    status, told = migrated(tmp_path, capsys, "echo hello")
    assert status == 2
    assert "starts none of verl's entry points (" in told
    assert main(["migrate", str(tmp_path / "none.sh")]) == 2
