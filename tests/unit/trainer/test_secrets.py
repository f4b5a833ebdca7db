"""What is written about a run has no secrets; the run itself has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from caldera.config import compose_config, config_to_dict
from caldera.config.offline import EvaluationConfig
from caldera.config.ppo import PPOTrainerConfig
from caldera.trainer.bundle import read_bundle, write_bundle
from caldera.trainer.repeat import main
from caldera.trainer.running import open_run
from caldera.trainer.secrets import masked_arguments, masked_dict

VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"
SECRETS = [
    f"+{VARIABLES}.MY_CREDS=hidden",
    "+custom_reward_function.reward_kwargs.api_key=hidden",
    "+custom_reward_function.reward_kwargs.hub_token=hidden",
    "+custom_reward_function.reward_kwargs.judge={password:hidden}",
    "trainer.wandb_proxy=http://me:hidden@proxy:80",
]
OPEN = [
    f"+{VARIABLES}.NCCL_DEBUG=INFO",
    "+custom_reward_function.reward_kwargs.max_tokens=512",
    "+custom_reward_function.reward_kwargs.eos_token=</s>",
    "+custom_reward_function.reward_kwargs.limits={max_tokens:512,min_tokens:-1,by_token:false}",
    "+custom_reward_function.reward_kwargs.per_token=true",
    "data.train_files=abfs://container@account.dfs.core.windows.net/train.parquet",
]


@pytest.fixture
def config(tmp_path: Path) -> PPOTrainerConfig:
    given = [*SECRETS, *OPEN, "trainer.logger=[console]", "actor_rollout_ref.model.path=m"]
    files = ["data.val_files=v", f"trainer.default_local_dir={tmp_path}"]
    return compose_config([*given, *files], "ppo_trainer", None, PPOTrainerConfig)


def test_defaults_hold_no_secrets() -> None:
    config = compose_config([], "ppo_trainer", None, PPOTrainerConfig)
    assert masked_dict(config) == config_to_dict(config)


def test_a_run_writes_no_secrets(
    tmp_path: Path, config: PPOTrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["caldera", "train", *SECRETS, *OPEN])
    given = config_to_dict(config)
    open_run(config, tmp_path, 0, 10).finish()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"config.yaml", "bundle.json"}
    assert not any("hidden" in path.read_text() for path in files)
    assert config_to_dict(config) == given and "hidden" in str(given)
    assert read_bundle(tmp_path)["command"][-len(OPEN) :] == OPEN
    assert "max_tokens: 512" in (tmp_path / "config.yaml").read_text()
    assert "hidden" not in str(masked_dict(config))


def test_a_finished_run_keeps_its_config(tmp_path: Path, config: PPOTrainerConfig) -> None:
    (tmp_path / "config.yaml").write_text("as it was")
    open_run(config, tmp_path, 10, 10).finish()
    assert (tmp_path / "config.yaml").read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("text", SECRETS)
def test_a_masked_command_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", "print('ran')", text])
    write_bundle(tmp_path, EvaluationConfig(), "evaluation.output_dir")
    assert main([str(tmp_path), "--run"]) == 2
    shown = capfd.readouterr()
    assert "bundles have no secrets" in shown.err and masked_arguments([text])[0] in shown.err
    assert "hidden" not in shown.out + shown.err and not shown.out.startswith("ran")
