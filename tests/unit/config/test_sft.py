"""The configuration of supervised fine-tuning: keys of two generations, and what a user is told.

Each file of tests/golden/sft has two lines: arguments, which come after the required ones, and the
message. `UPDATE_GOLDEN=1` writes the messages anew, to be read before they are kept.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from caldera.config import config_to_dict, load_supervised_config, resolve_supervised, uses_ray
from caldera.config.sft import SFTTrainerConfig, choose_batch_size
from caldera.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "golden" / "sft"
CASES = {path.stem: path for path in sorted(FOLDER.glob("*.txt"))}
REQUIRED = ["data.train_files=train.parquet", "model.partial_pretrain=M"]


def load(*overrides: str, name: str = "sft_trainer") -> SFTTrainerConfig:
    return load_supervised_config([*REQUIRED, *overrides], name, None, SFTTrainerConfig)


def at(config: SFTTrainerConfig, key: str) -> Any:
    tree: Any = config_to_dict(config)
    for name in key.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("path", CASES.values(), ids=CASES)
def test_the_message_is_the_recorded_one(path: Path) -> None:
    line, *recorded = path.read_text(encoding="utf-8").splitlines()
    arguments, name = shlex.split(line), "sft_trainer"
    if arguments[0].startswith("--config-name="):
        name = arguments.pop(0).partition("=")[2]
    with pytest.raises(ConfigError) as raised:
        resolve_supervised(load(*arguments, name=name), gpus=0)
    message = str(raised.value)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(f"{line}\n{message}\n", encoding="utf-8")
        recorded = [message]
    assert [message] == recorded


def test_keys_of_the_later_generation_land_in_their_places() -> None:
    given = {
        "model.path": ("model.path", "M"),
        "data.messages_key": ("data.multiturn.messages_key", "talk"),
        "data.tools_key": ("data.multiturn.tools_key", "t"),
        "data.enable_thinking_key": ("data.multiturn.enable_thinking_key", "e"),
        "data.pad_mode": ("data.pad_mode", "no_padding"),
        "engine.strategy": ("model.strategy", "fsdp"),
        "engine.param_offload": ("model.fsdp_config.param_offload", True),
        "engine.fsdp_size": ("model.fsdp_config.fsdp_size", 2),
        "engine.ulysses_sequence_parallel_size": ("ulysses_sequence_parallel_size", 2),
        "optim.lr_scheduler_type": ("optim.lr_scheduler", "constant"),
        "optim.min_lr_ratio": ("optim.min_lr_ratio", 0.1),
        "checkpoint.save_contents": ("trainer.checkpoint.save_contents", ["model", "hf_model"]),
        "model.use_remove_padding": ("model.use_remove_padding", True),
    }
    overrides = [f"{key}={str(value).replace(' ', '')}" for key, (_, value) in given.items()]
    config = load("engine=fsdp", "optim=fsdp", *overrides, name="sft_trainer_engine")
    for place, value in given.values():
        assert at(config, place) == value, place


def test_the_two_files_differ_in_conversations_and_micro_batches() -> None:
    classic, later = load(), load(name="sft_trainer_engine")
    sized = (
        load("data.micro_batch_size_per_gpu=4"),
        load("data.micro_batch_size_per_gpu=4", name="sft_trainer_engine"),
    )
    assert [config.data.multiturn.enable for config in (classic, later)] == [False, True]
    assert [config.data.use_dynamic_bsz for config in sized] == [False, True]
    later.data.multiturn.enable = False
    assert classic == later


def test_how_batches_are_cut() -> None:
    """By tokens, unless a key asks for samples; verl's default is four of these."""
    for keys, expected in {
        (): (True, None),
        ("data.micro_batch_size_per_gpu=8",): (False, 8),
        ("data.use_dynamic_bsz=False",): (False, 4),
        ("data.micro_batch_size_per_gpu=8", "data.use_dynamic_bsz=True"): (True, 8),
    }.items():
        data = load(*keys).data
        assert (data.use_dynamic_bsz, data.micro_batch_size_per_gpu) == expected


@pytest.mark.parametrize(
    ("gpus", "length", "tokens"), [(0, 1024, 4096), (1, 1024, 8192), (1, 9000, 9000)]
)
def test_the_default_tokens_of_a_micro_batch(gpus: int, length: int, tokens: int) -> None:
    config = load(f"data.max_length={length}", "trainer.n_gpus_per_node=1")
    resolve_supervised(config, gpus)
    assert config.data.max_token_len_per_gpu == tokens


def test_keys_of_classic_scripts() -> None:
    """As verl's examples write them."""
    config = load(
        "data.prompt_key=extra_info", "data.response_key=extra_info",
        "+data.prompt_dict_keys=['question']", "+data.response_dict_keys=['answer']",
        "data.micro_batch_size_per_gpu=4", "trainer.default_hdfs_dir=null",
        "trainer.logger=['console']", "model.fsdp_config.cpu_offload=True",
        "model.fsdp_config.offload_params=True", "use_remove_padding=true",
        "ulysses_sequence_parallel_size=2", "model.lora_rank=32", "model.target_modules=all-linear",
    )  # fmt: skip
    assert config.data.prompt_dict_keys == ["question"]
    memory = config.model.fsdp_config
    assert (memory.offload_policy, memory.param_offload, memory.seed) == (True, True, 1)


@pytest.mark.parametrize(
    ("keys", "rows", "size"),
    [
        ((), 1000, 256),
        ((), 100, 100),
        (("trainer.n_gpus_per_node=3",), 1000, 255),
        (("trainer.n_gpus_per_node=8",), 5, 8),  # the loader says that there are too few
        (("data.train_batch_size=64",), 5, 64),
    ],
)
def test_the_default_batch(keys: tuple[str, ...], rows: int, size: int) -> None:
    assert choose_batch_size(load(*keys), rows) == size


def test_one_seed() -> None:
    assert load("trainer.seed=5").model.fsdp_config.seed == 5


def test_the_optimizer_of_the_engine() -> None:
    optim = load("optim.lr=0.5", "optim.lr_warmup_steps=3").optim.for_engine(70)
    assert (optim.lr, optim.lr_warmup_steps, optim.total_training_steps) == (0.5, 3, 70)
    assert (optim.lr_scheduler_type, optim.betas) == ("cosine", [0.9, 0.95])


class TestMachine:
    def test_a_machine_without_gpus(self) -> None:
        config = load()
        assert resolve_supervised(config, gpus=0) == [
            "trainer.worker_group=local",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            "data.max_token_len_per_gpu=4096",
            "model.fsdp_config.dtype=float32",
        ]

    def test_all_gpus(self) -> None:
        config = load()
        resolve_supervised(config, gpus=8)
        trainer = config.trainer
        assert (trainer.device, trainer.n_gpus_per_node) == ("cuda", 8)
        assert config.model.fsdp_config.dtype == "bfloat16"

    def test_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not uses_ray(load())
        assert uses_ray(load("trainer.nnodes=2"))
        monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
        assert uses_ray(load())

    def test_torchrun_says_how_many(self) -> None:
        config = load("trainer.nnodes=1")
        resolve_supervised(config, gpus=0, launched=(2, 4))
        assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 4)

    def test_torchrun_and_the_config_disagree(self) -> None:
        with pytest.raises(ConfigError, match=r"n_gpus_per_node=8: torchrun has started 2 proc"):
            resolve_supervised(load("trainer.n_gpus_per_node=8"), gpus=0, launched=(1, 2))
        with pytest.raises(ConfigError, match=r"worker_group='ray': torchrun has started"):
            resolve_supervised(load("trainer.worker_group=ray"), gpus=0, launched=(1, 2))
        with pytest.raises(ConfigError, match=r"nnodes=3: torchrun has started processes on 2 no"):
            resolve_supervised(load("trainer.nnodes=3"), gpus=0, launched=(2, 2))

    def test_torchrun_and_the_config_agree(self) -> None:
        config = load("trainer.nnodes=2", "trainer.worker_group=local", "trainer.n_gpus_per_node=4")
        resolve_supervised(config, gpus=0, launched=(2, 4))
        assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 4)
