"""Supervised training: checks that need more than one key, and defaults of the machine."""

from __future__ import annotations

from typing import Any

from caldera.config.fields import as_list, check_console_metrics, shown
from caldera.config.machine import (
    check_gpus_here,
    choose_devices,
    default_dtype,
    warn_of_cores,
)
from caldera.config.sft import EACH_EPOCH, SFTTrainerConfig
from caldera.config.sft_strategies import (
    check_supervised_ranks,
    check_supervised_strategy,
    memory_of_supervised,
    supervised_sequence_parallel_size,
)
from caldera.config.validate import (
    check_betas,
    check_contents,
    check_dtypes,
    check_layout,
)
from caldera.errors import ConfigError


def check_supervised(config: SFTTrainerConfig) -> None:
    """Keys fit together; lists that may be written as one string become lists."""
    data, trainer = config.data, config.trainer
    _check_model(config)
    if not data.train_files:
        raise ConfigError("data.train_files is required: give data.train_files=...")
    data.train_files = as_list("data.train_files", data.train_files)
    if data.val_files is not None:
        data.val_files = as_list("data.val_files", data.val_files)
    trainer.logger = as_list("trainer.logger", trainer.logger)
    trainer.console_metrics = check_console_metrics(trainer.console_metrics)
    _check_run(config)
    check_contents("trainer.checkpoint", trainer.checkpoint)
    check_layout("trainer.checkpoint", trainer.checkpoint)
    check_dtypes("model.fsdp_config", config.model.fsdp_config)
    check_betas("optim", config.optim.betas)
    check_supervised_strategy(config)
    _check_tokens(config)


def _check_model(config: SFTTrainerConfig) -> None:
    model = config.model
    if not model.path:
        raise ConfigError(
            "model.partial_pretrain is required: give model.partial_pretrain=... (or model.path)"
        )
    same = {
        ("model.partial_pretrain", "model.path"): (model.partial_pretrain, model.path),
        ("data.chat_template", "model.custom_chat_template"): (
            config.data.chat_template,
            model.custom_chat_template,
        ),
    }
    for (one, other), (value, newer) in same.items():
        if value is not None and value != newer:
            raise ConfigError(
                f"{one}={shown(value)} and {other}={shown(newer)} are one key: set one alone"
            )


def _check_run(config: SFTTrainerConfig) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=...")
    for key, value in {
        "trainer.save_freq": trainer.save_freq,
        "trainer.test_freq": trainer.test_freq,
    }.items():
        _check_frequency(key, value)
    validates = trainer.test_freq == EACH_EPOCH or trainer.test_freq > 0
    if validates and not config.data.val_files:
        raise ConfigError(
            f"trainer.test_freq={trainer.test_freq} needs data.val_files=...; -1 does without"
        )


def _check_frequency(key: str, value: Any) -> None:
    is_steps = isinstance(value, int) and not isinstance(value, bool)
    if value != EACH_EPOCH and not (is_steps and (value == -1 or value > 0)):
        raise ConfigError(
            f"{key}={shown(value)}: takes a number of steps from 1, -1 for never, or {EACH_EPOCH}"
        )


def _check_tokens(config: SFTTrainerConfig) -> None:
    data, ranks = config.data, supervised_sequence_parallel_size(config)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu * ranks < data.max_length:
        shared = f" x {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}{shared} tokens cannot hold "
            f"one sample of up to data.max_length={data.max_length} tokens; takes at least "
            f"{-(-data.max_length // ranks)}"
        )


def resolve_supervised(
    config: SFTTrainerConfig, gpus: int, launched: tuple[int, int] | None = None
) -> list[str]:
    """Fill in what depends on the machine; returns what was chosen, for a person to read.

    `gpus` are those of this machine, or of a node of the cluster; `launched` has the nodes and the
    processes of each where somebody has started these already.
    """
    trainer = config.trainer
    chosen: list[str] = []
    if launched is not None:
        _take_launched(config, *launched)
    elif trainer.nnodes > 1 and trainer.worker_group == "local":
        raise ConfigError(
            f"trainer.worker_group='local': trainer.nnodes={trainer.nnodes} nodes need 'ray', or "
            "torchrun on each of them"
        )
    device, ranks = choose_devices(config, gpus, chosen)
    check_gpus_here(config, gpus)
    if trainer.worker_group != "ray" and launched is None:
        warn_of_cores(device, ranks)
    _check_devices(config, ranks * trainer.nnodes)
    name, memory = memory_of_supervised(config)
    if memory.dtype is None:
        memory.dtype = default_dtype(device, memory)
        chosen.append(f"model.{name}.dtype={memory.dtype}")
    return chosen


def _take_launched(config: SFTTrainerConfig, nodes: int, processes: int) -> None:
    trainer = config.trainer
    if trainer.worker_group == "ray":
        raise ConfigError(
            "trainer.worker_group='ray': torchrun has started the processes; start the run "
            "without it, or leave the key out"
        )
    if trainer.n_gpus_per_node not in (None, processes):
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: torchrun has started {processes} "
            "processes on this node; leave the key out"
        )
    if trainer.nnodes not in (1, nodes):  # 1 is what the key has where it was left out
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes}: torchrun has started processes on {nodes} nodes; "
            "leave the key out"
        )
    trainer.worker_group, trainer.nnodes, trainer.n_gpus_per_node = "local", nodes, processes


def _check_devices(config: SFTTrainerConfig, devices: int) -> None:
    """Every rank gets as many samples as the others."""
    parts = devices // check_supervised_ranks(config, devices)
    if config.data.train_batch_size % parts:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size} samples cannot be shared by "
            f"{parts} ranks (trainer.n_gpus_per_node x trainer.nnodes, less those that share "
            "samples)"
        )
