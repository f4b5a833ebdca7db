"""The configurations of reward models and of DPO extend that of supervised training."""

from __future__ import annotations

from typing import Any

import pytest

from caldera.config.fields import walk
from caldera.config.loader import SCHEMAS, load_supervised_config
from caldera.config.preference import DPOTrainerConfig, RewardModelTrainerConfig
from caldera.config.sft import SFTTrainerConfig
from caldera.errors import ConfigError, UnknownKeyError, UnsupportedError

REQUIRED = ["data.train_files=train.parquet", "model.partial_pretrain=model"]


def load(name: str, *overrides: str) -> Any:
    return load_supervised_config([*REQUIRED, *overrides], name, None, SCHEMAS[name])


@pytest.mark.parametrize("name", ["rm_trainer", "dpo_trainer"])
def test_every_key_of_supervised_training_is_known(name: str) -> None:
    keys = {key for key, _, _ in walk(SCHEMAS[name]())}
    assert {key for key, _, _ in walk(SFTTrainerConfig())} < keys


def test_defaults() -> None:
    judge, direct = load("rm_trainer"), load("dpo_trainer")
    for config in (judge, direct):
        data = config.data
        assert (data.prompt_key, data.chosen_key, data.rejected_key) == (
            "prompt",
            "chosen",
            "rejected",
        )
    assert judge.data.margin_key is None
    assert (judge.optim.lr, direct.optim.lr) == (1e-5, 1e-6)
    assert judge.trainer.default_local_dir == "checkpoints/reward-model/test"
    assert direct.trainer.default_local_dir == "checkpoints/dpo/test"
    dpo = direct.dpo
    assert (dpo.beta, dpo.loss_type, dpo.label_smoothing, dpo.reference_free) == (
        0.1, "sigmoid", 0.0, False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["rm_trainer", "dpo_trainer"])
@pytest.mark.parametrize(
    "override",
    [
        "data.response_key=answer_2",
        "data.prompt_dict_keys=[text]",
        "data.response_dict_keys=[text]",
        "data.multiturn.enable=True",
        "data.multiturn.messages_key=turns",
        "data.ignore_input_ids_mismatch=True",
    ],
)
def test_columns_of_other_samples_are_refused(name: str, override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UnsupportedError, match=rf"^{key}=.* is not supported: a sample is a pair"):
        load(name, override)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("dpo_trainer", ["data.margin_key=far"], r"^data\.margin_key='far' is not supported: "),
        ("rm_trainer", ["data.pad_mode=right"], r"^data\.pad_mode='right' is not supported: seq"),
        ("dpo_trainer", ["data.pad_mode=right"], r"^data\.pad_mode='right' is not supported: seq"),
        ("dpo_trainer", ["dpo.beta=0"], r"^dpo\.beta=0\.0: must be more than 0"),
        ("dpo_trainer", ["dpo.beta=-1"], r"^dpo\.beta=-1\.0: must be at least 0"),
        ("dpo_trainer", ["dpo.loss_type=kto"], r"^dpo\.loss_type='kto': takes one of sigmoid, ipo"),
        ("dpo_trainer", ["dpo.label_smoothing=0.6"], r"^dpo\.label_smoothing=0\.6: .* to 0\.5"),
        (
            "dpo_trainer",
            ["dpo.label_smoothing=0.1", "dpo.loss_type=hinge"],
            r"^dpo\.label_smoothing=0\.1: dpo\.loss_type='hinge' takes 0; sigmoid can",
        ),
        (
            "rm_trainer",
            ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=2000"],
            r"^data\.max_token_len_per_gpu=2000 tokens cannot hold the responses .*at least 2048$",
        ),
    ],
)
def test_what_does_not_fit(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name, *overrides)


def test_ranks_that_share_tokens_hold_a_pair_together() -> None:
    shared = ["data.use_dynamic_bsz=True", "ulysses_sequence_parallel_size=2"]
    load("rm_trainer", *shared, "data.max_token_len_per_gpu=1024")
    with pytest.raises(ConfigError, match=r"=1023 x 2 ranks tokens .* at least 1024$"):
        load("rm_trainer", *shared, "data.max_token_len_per_gpu=1023")


def test_keys_of_the_other_objective_are_unknown() -> None:
    with pytest.raises(UnknownKeyError, match=r"'dpo\.beta'"):
        load("rm_trainer", "dpo.beta=0.2")


def test_reward_models_are_not_trained_by_megatron() -> None:
    keys = ["data.train_files=x", "model.partial_pretrain=M", "model.strategy=megatron"]
    with pytest.raises(UnsupportedError, match="reward models are trained by local, fsdp"):
        load_supervised_config(keys, "rm_trainer", None, RewardModelTrainerConfig)
    config = load_supervised_config(keys, "dpo_trainer", None, DPOTrainerConfig)
    assert config.model.strategy == "megatron"
