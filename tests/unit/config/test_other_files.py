"""The defaults of generating, of scoring and of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import pytest

from caldera.config import compose_config, config_to_dict
from caldera.config.fields import check_values, walk
from caldera.config.loader import SCHEMAS
from caldera.errors import ConfigError, UnknownKeyError

GENERATION = {
    "data.path": None,
    "data.prompt_key": "prompt",
    "data.n_samples": 5,
    "data.output_path": None,
    "data.batch_size": 128,
    "model.path": None,
    "rollout.temperature": 1.0,
    "rollout.top_k": 50,
    "rollout.top_p": 0.7,
    "rollout.prompt_length": 1536,
    "rollout.response_length": 512,
    "trainer.nnodes": 1,
}
EVALUATION = {
    "data.path": None,
    "data.prompt_key": "prompt",
    "data.response_key": "responses",
    "data.data_source_key": "data_source",
    "data.reward_model_key": "reward_model",
    "custom_reward_function.path": None,
    "custom_reward_function.name": "compute_score",
}
SFT = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.prompt_dict_keys": None,
    "data.response_dict_keys": None,
    "data.multiturn.enable": False,
    "data.multiturn.messages_key": "messages",
    "data.multiturn.tools_key": "tools",
    "data.multiturn.enable_thinking_key": "enable_thinking",
    "data.max_length": 1024,
    "data.truncation": "error",
    "data.balance_dp_token": False,
    "data.chat_template": None,
    "data.custom_cls.path": None,
    "data.custom_cls.name": None,
    "model.partial_pretrain": None,
    "model.fsdp_config.model_dtype": "fp32",
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "model.use_liger": False,
    "model.strategy": "fsdp2",
    "model.enable_gradient_checkpointing": True,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler": "cosine",
    "ulysses_sequence_parallel_size": 1,
    "use_remove_padding": False,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.default_local_dir": "checkpoints/gsm8k-sft/test",
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
    "trainer.resume_mode": "auto",
    "trainer.checkpoint.save_contents": ["model", "optimizer", "extra"],
}
SFT_ENGINE = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "data.multiturn.messages_key": "messages",
    "data.multiturn.tools_key": "tools",
    "data.multiturn.enable_thinking_key": "enable_thinking",
    "data.pad_mode": "no_padding",
    "data.max_length": 1024,
    "data.truncation": "error",
    "data.ignore_input_ids_mismatch": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "generation": GENERATION,
    "evaluation": EVALUATION,
    "sft_trainer": SFT,
    "sft_trainer_engine": SFT_ENGINE,
}
"""verl's, by file."""
BY_TOKENS = {
    "data.train_batch_size": None,
    "data.micro_batch_size_per_gpu": None,
    "data.max_token_len_per_gpu": None,
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "generation": {"rollout.name": None, "trainer.n_gpus_per_node": None},
    "evaluation": {},
    "sft_trainer_engine": {"data.multiturn.enable": True, **BY_TOKENS},
    "sft_trainer": {
        "trainer.logger": ["console", "file"],
        "trainer.n_gpus_per_node": None,
        **BY_TOKENS,
    },
}
"""Where verl has vllm, wandb and 8 devices, nothing but conversations, or sizes of micro-batches
and of batches that are chosen here."""


def at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    config: Any = compose_config([], name, None, SCHEMAS[name])
    check_values(config)
    for key, default in {**DEFAULTS[name], **DIFFERENT[name]}.items():
        assert at(config_to_dict(config), key) == default, key


def test_scoring_has_no_other_keys() -> None:
    keys = {key for key, _, _ in walk(SCHEMAS["evaluation"]())}
    ours = {key for key in keys if key.startswith("evaluation.")}
    assert keys - set(EVALUATION) - ours == {
        "custom_reward_function.reward_kwargs", "data.compare_path",
    }  # fmt: skip


def test_keys_of_another_command_are_unknown() -> None:
    with pytest.raises(
        UnknownKeyError, match=r"'data\.train_batch_size'; did you mean data\.batch"
    ):
        compose_config(["data.train_batch_size=8"], "generation", None, SCHEMAS["generation"])


def test_values_are_checked() -> None:
    overrides = ["rollout.top_p=70"]
    config: Any = compose_config(overrides, "generation", None, SCHEMAS["generation"])
    with pytest.raises(ConfigError, match=r"^rollout\.top_p=70\.0: must be from 0 to 1"):
        check_values(config)


def test_steps_or_each_epoch() -> None:
    overrides = ["trainer.save_freq=after_each_epoch", "trainer.test_freq=7"]
    config: Any = compose_config(overrides, "sft_trainer", None, SCHEMAS["sft_trainer"])
    trainer = config.trainer
    assert (trainer.save_freq, trainer.test_freq) == ("after_each_epoch", 7)
