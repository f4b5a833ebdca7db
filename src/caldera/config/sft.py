"""The configuration of supervised training, under verl's key names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.batches import default_tokens
from caldera.config.data import CustomClassConfig
from caldera.config.fields import (
    ConfigGroup,
    as_list,
    check_console_metrics,
    listed,
    mapping,
    nested,
    option,
    refused,
    shown,
)
from caldera.config.machine import (
    check_gpus_here,
    choose_devices,
    default_dtype,
    warn_of_cores,
)
from caldera.config.megatron import OPTIMIZER_OVERRIDES, MegatronConfig
from caldera.config.model import ModelConfig
from caldera.config.optim import CheckpointConfig, FSDPConfig, OptimizerConfig
from caldera.config.ppo import RayConfig
from caldera.config.reasons import ALWAYS_PACKED
from caldera.config.strategies import MEGATRON, OPTIMIZERS, Role, check_ranks, check_role
from caldera.config.trainer import RunKeys
from caldera.config.validate import (
    check_betas,
    check_contents,
    check_dtypes,
    check_layout,
    check_push,
    check_resume,
)
from caldera.errors import ConfigError, UnsupportedError

BATCH = 256
"""Samples of an optimiser step, where no key gives them."""
CUDA_TOKENS = 8192
"""Tokens of a micro-batch on a GPU, where no key gives them."""
SAMPLES = 4
"""Samples of a micro-batch that is not formed by tokens, where no key gives them."""
EACH_EPOCH = "after_each_epoch"


@dataclass
class MultiTurnDataConfig(ConfigGroup):
    enable: bool = False
    """Rows hold whole conversations instead of a prompt and a response."""
    messages_key: str = "messages"
    """Column with the messages."""
    tools_key: str = "tools"
    """Column with the tools' schemas, a list or JSON text; rows may lack it."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking on or off; rows may lack it."""


@dataclass
class SFTDataConfig(ConfigGroup):
    train_files: Any = None
    """What to train on: files (parquet, JSON, JSON lines, CSV, Arrow), a folder of them, or a data
    set of the Hugging Face Hub such as OWNER/NAME:train. Required."""
    val_files: Any = None
    """Files to validate on; null: no validation."""
    train_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Samples per optimiser step; null: 256, or as many as a smaller data set has."""
    micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward and backward pass on one device; null: 4 where use_dynamic_bsz is
    false."""
    use_dynamic_bsz: bool | None = None
    """Form micro-batches by tokens instead of by samples; null: where no size in samples is
    given."""
    max_token_len_per_gpu: int | None = option(None, minimum=1, unit="tokens")
    """Most tokens of a micro-batch formed by tokens; null: 8192, on a CPU 4096, and at least the
    longest sample."""
    prompt_key: str = "question"
    """Column with the prompt."""
    response_key: str = "answer"
    """Column with the answer."""
    prompt_dict_keys: list[str] | None = None
    """Path to the prompt inside that column; null: the column itself."""
    response_dict_keys: list[str] | None = None
    """Path to the answer inside that column; null: the column itself."""
    multiturn: MultiTurnDataConfig = nested(MultiTurnDataConfig)
    max_length: int = option(1024, minimum=2, unit="tokens")
    """Most tokens of a sample."""
    truncation: str = option("error", choices=("error", "left", "right"))
    """What happens to a sample that is too long: an error, or which part is cut away."""
    pad_mode: str = option("no_padding", choices=("no_padding", "right"))
    """How rows are handed over; what the model computes has no padding in either case."""
    ignore_input_ids_mismatch: bool = False
    """Conversations whose messages, templated one by one, are not the whole conversation's
    template: train on the former instead of an error."""
    shuffle: bool = True
    """Draw training rows in random order."""
    dataloader_num_workers: int = option(0, minimum=0, unit="processes")
    """Processes that prepare rows; 0: this one."""
    balance_dp_token: bool = False
    """Deal samples to ranks so that all have the same number of tokens."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    custom_cls: CustomClassConfig = nested(CustomClassConfig)
    custom: dict[str, Any] = II("custom")
    """Follows `custom`, the place to set keys for custom code."""
    apply_chat_template_kwargs: dict[str, Any] = mapping()
    """Further arguments of the chat template."""

    @property
    def longest(self) -> int:
        """Most tokens of what a micro-batch has to hold at least."""
        return self.max_length

    @property
    def longest_in_words(self) -> str:
        return f"one sample of up to data.max_length={self.max_length} tokens"


@dataclass
class SFTMemoryConfig(FSDPConfig):
    seed: int = II("trainer.seed")
    """Seed of freshly initialised weights, such as an adapter."""


@dataclass
class SFTMegatronConfig(MegatronConfig):
    seed: int = II("trainer.seed")
    """Seed of freshly initialised weights."""


@dataclass
class SFTModelConfig(ModelConfig):
    partial_pretrain: str | None = None
    """Folder or hub name of the model to start from. Required."""
    path: str | None = II("model.partial_pretrain")
    """The newer name of partial_pretrain."""
    custom_chat_template: str | None = II("data.chat_template")
    """The newer name of data.chat_template."""
    fsdp_config: SFTMemoryConfig = nested(SFTMemoryConfig)
    strategy: str = option("fsdp2", choices=("local", "fsdp", "fsdp2", "megatron"))
    """Training engine."""
    megatron: SFTMegatronConfig = nested(SFTMegatronConfig)


@dataclass
class SFTOptimizerConfig:
    optimizer: str = "AdamW"
    """Class name of the optimiser."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the class."""
    lr: float = option(1e-5, minimum=0)
    """Peak learning rate."""
    betas: list[float] = listed(0.9, 0.95)
    """Decay rates of Adam's averages."""
    weight_decay: float = option(0.01, minimum=0)
    """Decoupled weight decay."""
    lr_warmup_steps_ratio: float = option(0.1, minimum=0, maximum=1, unit="share of steps")
    """Warm-up as a share of all steps; used when lr_warmup_steps is negative."""
    lr_warmup_steps: int = option(-1, unit="steps")
    """Warm-up in steps; negative: taken from lr_warmup_steps_ratio."""
    clip_grad: float = option(1.0, minimum=0)
    """Largest gradient norm of an optimiser step; 0: no clipping."""
    lr_scheduler: str = option("cosine", choices=("constant", "cosine"))
    """Shape of the schedule after the warm-up."""
    min_lr_ratio: float = option(0.0, minimum=0, maximum=1, unit="share of lr")
    """Floor of the cosine schedule."""
    num_cycles: float = option(0.5, unit="cycles")
    """Cycles of the cosine schedule."""
    override_optimizer_config: dict[str, Any] | None = mapping()
    """Further arguments of the optimiser's class."""

    def for_engine(self, total_training_steps: int) -> OptimizerConfig:
        """The same as an engine takes it, with the length of the schedule."""
        return OptimizerConfig(
            optimizer=self.optimizer,
            optimizer_impl=self.optimizer_impl,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            lr_warmup_steps_ratio=self.lr_warmup_steps_ratio,
            lr_warmup_steps=self.lr_warmup_steps,
            lr_scheduler_type=self.lr_scheduler,
            lr_decay_style=self.lr_scheduler,  # the same, by the name that Megatron's engine reads
            min_lr_ratio=self.min_lr_ratio,
            min_lr=self.min_lr_ratio * self.lr,
            num_cycles=self.num_cycles,
            override_optimizer_config=self.override_optimizer_config,
            total_training_steps=total_training_steps,
        )


@dataclass
class SFTRunConfig(RunKeys):
    project_name: str = "gsm8k-sft"
    """Project under which loggers file the run."""
    experiment_name: str = "test"
    """Name of the run."""
    total_epochs: int = option(4, minimum=1, unit="epochs")
    """Passes over the training data."""
    worker_class: str | None = None
    """The worker of the model: a name that is registered, or a class derived from SupervisedWorker,
    as my.module.MyWorker or path/to/file.py:MyWorker; null: SupervisedWorker."""
    seed: int = 1
    """Seed of the order of the data and of fresh weights."""
    save_freq: Any = option(-1, unit="steps")
    """Steps between checkpoints, the last step included; -1: none; `after_each_epoch`."""
    test_freq: Any = option(-1, unit="steps")
    """Steps between validations, the last step included; -1: none; `after_each_epoch`."""
    max_ckpt_to_keep: int | None = option(None, minimum=1, unit="checkpoints")
    """Newest checkpoints that are kept; null: all."""
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
    nnodes: int = option(1, minimum=1, unit="nodes")
    """Machines of the run; under torchrun, those that it starts."""
    n_gpus_per_node: int | None = option(None, minimum=1, unit="devices")
    """Devices (GPUs, or processes on a CPU) a node; null: torchrun's processes, else all GPUs, or
    one process on a CPU."""
    worker_group: str | None = option(None, choices=("local", "ray"))
    """Where workers live: processes of this machine, or Ray's. null: Ray for several nodes, or
    where RAY_ADDRESS names a cluster; else local. Under torchrun: its processes."""
    nccl_timeout: int = option(600, minimum=1, unit="seconds")
    """How long a call may take on the workers, and a rank wait for another."""

    def checkpoints_to_keep(self, role: str) -> int | None:
        return self.max_ckpt_to_keep if role == "actor" else None


@dataclass
class SFTTrainerConfig(ConfigGroup):
    data: SFTDataConfig = nested(SFTDataConfig)
    model: SFTModelConfig = nested(SFTModelConfig)
    optim: SFTOptimizerConfig = nested(SFTOptimizerConfig)
    ulysses_sequence_parallel_size: int = option(1, minimum=1, unit="devices")
    """Devices that share one sequence."""
    use_remove_padding: bool = refused(False, ALWAYS_PACKED, met=(True,))
    trainer: SFTRunConfig = nested(SFTRunConfig)
    custom: dict[str, Any] = mapping()
    """Keys for custom code: trainers read `config.custom`, data sets `config.custom` of theirs."""
    ray_kwargs: RayConfig = nested(RayConfig)


# ---- Checks, and defaults of the machine


def check_supervised_strategy(config: SFTTrainerConfig) -> None:
    """The model has keys of its own strategy alone, and they fit together."""
    role = _role(config)
    check_role(config, role)
    if not role.is_megatron:
        return
    tokens = config.ulysses_sequence_parallel_size
    if tokens != 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={tokens} is a key of local, fsdp and fsdp2; "
            "model.strategy='megatron' takes model.megatron.context_parallel_size"
        )
    layout = config.trainer.checkpoint.layout
    if layout != "dist":
        raise UnsupportedError(
            f"trainer.checkpoint.layout={layout!r} is not supported with "
            "model.strategy='megatron': takes dist"
        )
    _check_optimizer(config.optim)


def _check_optimizer(optim: SFTOptimizerConfig) -> None:
    """Megatron has optimisers and schedules of its own."""
    if optim.optimizer not in OPTIMIZERS or optim.optimizer_impl != "torch.optim":
        name = f"{optim.optimizer_impl}.{optim.optimizer}"
        raise ConfigError(
            f"optim.optimizer={name}: model.strategy='megatron' takes {', '.join(OPTIMIZERS)}"
        )
    if optim.num_cycles != 0.5:
        raise UnsupportedError(
            f"optim.num_cycles={optim.num_cycles} is not supported with "
            "model.strategy='megatron': takes 0.5"
        )
    known = OPTIMIZER_OVERRIDES[OPTIMIZERS[optim.optimizer]]
    for name, value in (optim.override_optimizer_config or {}).items():
        if name not in known:
            raise UnsupportedError(
                f"optim.override_optimizer_config.{name}={shown(value)} is not supported: "
                f"{optim.optimizer} of model.strategy='megatron' takes {', '.join(known)}"
            )


def check_supervised_ranks(config: SFTTrainerConfig, devices: int) -> int:
    """Ranks that share samples, which must divide the devices."""
    role = _role(config)
    if role.is_megatron:
        check_ranks(role, devices)
        return role.megatron.ranks_of_a_copy
    tokens = config.ulysses_sequence_parallel_size
    matrices = config.model.fsdp_config.tensor_parallel_size
    if devices % (tokens * matrices):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={tokens} x model.fsdp_config.tensor_parallel_size="
            f"{matrices} ranks do not divide the {devices} devices "
            "(trainer.n_gpus_per_node x trainer.nnodes)"
        )
    return tokens * matrices


def supervised_sequence_parallel_size(config: SFTTrainerConfig) -> int:
    """Ranks that share the tokens of a micro-batch."""
    if config.model.strategy == MEGATRON:
        return config.model.megatron.context_parallel_size
    return config.ulysses_sequence_parallel_size


def memory_of_supervised(config: SFTTrainerConfig) -> tuple[str, FSDPConfig | MegatronConfig]:
    """What says the precision of the model, and its name among the model's keys."""
    model = config.model
    if model.strategy == MEGATRON:
        return "megatron", model.megatron
    return "fsdp_config", model.fsdp_config


def _role(config: SFTTrainerConfig) -> Role:
    return Role("model", config.model, "model", config.model, True, "trainer", None)


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
    check_push(trainer, trainer.save_freq, trainer.checkpoint, config.model)
    check_dtypes("model.fsdp_config", config.model.fsdp_config)
    check_betas("optim", config.optim.betas)
    check_supervised_strategy(config)
    if data.use_dynamic_bsz is None:
        data.use_dynamic_bsz = data.micro_batch_size_per_gpu is None
    if data.micro_batch_size_per_gpu is None and not data.use_dynamic_bsz:
        data.micro_batch_size_per_gpu = SAMPLES
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
    check_resume(trainer.resume_mode, trainer.resume_from_path)
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
    tokens = data.max_token_len_per_gpu
    if data.use_dynamic_bsz and tokens is not None and tokens * ranks < data.longest:
        shared = f" x {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"data.max_token_len_per_gpu={tokens}{shared} tokens cannot hold "
            f"{data.longest_in_words}; takes at least {-(-data.longest // ranks)}"
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
    chosen += _choose_tokens(config, device)
    name, memory = memory_of_supervised(config)
    if memory.dtype is None:
        memory.dtype = default_dtype(device, memory)
        chosen.append(f"model.{name}.dtype={memory.dtype}")
    return chosen


def _choose_tokens(config: SFTTrainerConfig, device: str) -> list[str]:
    data, ranks = config.data, supervised_sequence_parallel_size(config)
    if data.max_token_len_per_gpu is not None:
        return []
    tokens = default_tokens(CUDA_TOKENS, device, data.longest, ranks)
    data.max_token_len_per_gpu = tokens
    return [f"data.max_token_len_per_gpu={tokens}"] if data.use_dynamic_bsz else []


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


def choose_batch_size(config: SFTTrainerConfig, rows: int) -> int:
    """Samples of an optimiser step, for a data set of so many rows: `data.train_batch_size`, else
    as many as the ranks can share."""
    if config.data.train_batch_size is not None:
        return config.data.train_batch_size
    devices = (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes
    parts = devices // check_supervised_ranks(config, devices)
    return max(parts, min(BATCH, rows) // parts * parts)


def _check_devices(config: SFTTrainerConfig, devices: int) -> None:
    """Every rank gets as many samples as the others."""
    parts = devices // check_supervised_ranks(config, devices)
    if (config.data.train_batch_size or 0) % parts:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size} samples cannot be shared by "
            f"{parts} ranks (trainer.n_gpus_per_node x trainer.nnodes, less those that share "
            "samples)"
        )
