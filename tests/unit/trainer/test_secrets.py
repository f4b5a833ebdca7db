"""What is written about a run has no secrets; the run itself has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from caldera.commands.repeat import main
from caldera.config import compose_config, config_to_dict
from caldera.config.offline import EvaluationConfig
from caldera.config.ppo import PPOTrainerConfig
from caldera.trainer.bundle import read_bundle, write_bundle
from caldera.trainer.running import open_run
from caldera.trainer.secrets import (
    is_shown_variable,
    masked_arguments,
    masked_dict,
    masked_text,
    masked_values,
)

VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"
SECRETS = [
    f"+{VARIABLES}.MY_CREDS=hidden",
    "+custom_reward_function.reward_kwargs.api_key=hidden",
    "+custom_reward_function.reward_kwargs.hub_token=hidden",
    "+custom_reward_function.reward_kwargs.judge={password:hidden}",
    "trainer.wandb_proxy=http://me:hidden@proxy:80",
    *(
        f"+custom_reward_function.reward_kwargs.{name}=hidden"
        for name in ("openai_key", "openaiKey", "auth", "bearer", "pw", "passphrase", "hf_key")
    ),
    "+custom_reward_function.reward_kwargs.url='https://s/x?a=1&X-Amz-Signature=hidden'",
    "+custom_reward_function.reward_kwargs.blob='https://s/x?sig=hidden&b=2'",
    "+custom_reward_function.reward_kwargs.header='Bearer hidden-hidden'",
    "+custom_reward_function.reward_kwargs.text='with sk-hiddenhiddenhidden inside'",
    "+custom_reward_function.reward_kwargs.hub='hf_hiddenhiddenhidden'",
]
OPEN = [
    f"+{VARIABLES}.NCCL_DEBUG=INFO",
    "+custom_reward_function.reward_kwargs.max_tokens=512",
    "+custom_reward_function.reward_kwargs.eos_token=</s>",
    "+custom_reward_function.reward_kwargs.limits={max_tokens:512,min_tokens:-1,by_token:false}",
    "+custom_reward_function.reward_kwargs.per_token=true",
    "+custom_reward_function.reward_kwargs.author=me",
    "+custom_reward_function.reward_kwargs.answer_key=answer",
    "+custom_reward_function.reward_kwargs.tokenizer=sk-learn",
    "+custom_reward_function.reward_kwargs.page='https://s/x?page=2&design=a'",
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


def test_options_and_variables_hide_secrets() -> None:
    command = ["serve", "--password", "hidden", "--host", "127.0.0.1", "--auth=hidden"]
    assert masked_arguments(command) == [
        "serve", "--password", "***", "--host", "127.0.0.1", "--auth=***",
    ]  # fmt: skip
    assert not any(map(is_shown_variable, ["CALDERA_AUTH", "CALDERA_PW", "VERL_API_KEY"]))
    assert all(map(is_shown_variable, ["CALDERA_CACHE", "VERL_LOGGING_LEVEL", "HF_HUB_OFFLINE"]))


@pytest.mark.parametrize(
    "values",
    [
        {"db_pass": "hidden"},
        {"grader_key": "hidden"},
        {"my_key": "hidden0123456789abcdef"},
        {"jwt": "hidden"},
        {"headers": [["Authorization", "hidden"], ["X-Api-Key", "hidden"]]},
        {"headers": "X-Api-Key: hidden"},
        {"env": [{"name": "OPENAI_API_KEY", "value": "hidden"}]},
        {"command": ["judge", "--api-key", "hidden", "--password=hidden"]},
        {"store": "AccountName=a;AccountKey=hidden;EndpointSuffix=b"},
        {"body": '{"api_key": "hidden"}'},
        {"hook": "https://hooks.slack.com/services/T0/B0/hidden"},
        {"proxy": "http://me:with@hidden@proxy:80"},
        {"tokens": ["hidden"]},
        {"openaikey": "hidden", "JUDGEKEY": "hidden", "passkey": "hidden", "cred": "hidden"},
        {
            "userpw": "hidden",
            "mail": "https://s/x?apikey=hidden",
            "back": "https://s/#token=hidden",
        },
        {"maps": f"AIza{'hidden' * 6}", "slack": "xapp-1-hidden-hidden"},
        {"bot": "https://api.telegram.org/bot1:hidden/sendMessage"},
        {
            "sas": "hidden",
            "github_pat": "hidden",
            "oauth2": "hidden",
            "dsn": "hidden",
            "csrf": "hidden",
        },
        {"slack_webhook": "hidden", "totp": "hidden", "seed_phrase": "hidden", "hf_tok": "hidden"},
        {
            "conn_str": "hidden",
            "admin_key": "hidden",
            "session_key": "hidden",
            "storageKey": "hidden",
        },
        {"recovery_code": "hidden", "oauth_code": "hidden", "mnemonic": "hidden hidden"},
        {"headers": [{"key": "Authorization", "value": "hidden", "enabled": True}]},
        {"header": "Proxy-Authorization: Negotiate hidden", "other": "Authorization: hidden"},
        {"header": "Cookie: sid=hidden; id=hidden", "command": "curl -u me:hidden http://h"},
        {"command": "judge --token hidden", "args": ["--token", "hidden"]},
        {"shell": "export AUTH=hidden OPENAI_KEY=hidden HF_TOKEN='hidden'"},
        {"body": "{'auth': 'hidden', \"passphrase\": \"hidden\"}"},
        {"urls": "https://s/?pwd=hidden&pass=hidden#jwt=hidden https://s/x?Policy=hidden"},
    ],
)
def test_secrets_in_lists_headers_and_text(values: dict[str, Any]) -> None:
    assert "hidden" not in str(masked_values(values))


@pytest.mark.parametrize(
    "values",
    [
        {"user_key": "user", "judge_prompt_key": "prompt", "gdpo_reward_keys": ["acc", "len"]},
        {"image_token": "<image>", "end_token": "<|im_end|>", "mask_token": "[MASK]"},
        {"special_tokens": ["<think>", "</think>"], "sep_token": "\n"},
        {"system_prompt": "Give basic instructions. Pass: all tests."},
        {"by": ["token", "sequence"], "pass": 1, "key": "answer"},
        {"monkey": "a", "hotkeys": ["b"], "page": "https://s/#section", "pwm": "c"},
        {"question": "Is the author= of the cookie: recipes known?"},
        {"template": "{% set token=message.content %}{{ bos_token }} a 'key': 'value'"},
        {"pattern": "a.*b", "pin_memory": True, "patience": 3, "options": "--seed 1234 -n 5"},
        {"filters": [{"key": "level", "value": "hard"}, {"name": "a", "value": "b", "c": 1}]},
        {"key_value_heads": 8, "reward_fn_key": "data_source", "tokenizer": "gpt2"},
    ],
)
def test_what_is_no_secret_stays(values: dict[str, Any]) -> None:
    assert masked_values(values) == values


def test_lists_and_quoted_groups_of_a_command_hide_secrets() -> None:
    command = [
        "+x.headers=[Authorization, hidden]",
        "x='{auth: hidden}'",
        "x=['--token','hidden']",
        "trainer.logger=[console,file]",
    ]
    assert masked_arguments(command) == ["+x.headers=***", "x=***", "x=***", command[-1]]


def test_what_is_masked_stays_so() -> None:
    once = masked_text("Authorization: Basic hiddenhidden; Cookie: a=hidden; PW=hidden --pw hidden")
    assert "hidden" not in once and masked_text(once) == once


def test_a_user_and_password_in_a_header_are_hidden() -> None:
    assert masked_text("Authorization: Basic bWU6aGlkZGVu") == "Authorization: Basic ***"
