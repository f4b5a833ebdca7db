"""The configuration of supervised training, under verl's key names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.data import CustomClassConfig
from caldera.config.fields import ConfigGroup, listed, mapping, nested, option, refused
from caldera.config.megatron import MegatronConfig
from caldera.config.model import ModelConfig
from caldera.config.optim import CheckpointConfig, FSDPConfig, OptimizerConfig
from caldera.config.ppo import RayConfig
from caldera.config.reasons import ALWAYS_PACKED

EACH_EPOCH = "after_each_epoch"


@dataclass
class MultiTurnDataConfig(ConfigGroup):
    enable: bool = False
    """Rows hold whole conversations instead of a prompt and an answer."""
    messages_key: str = "messages"
    """Column with the messages."""
    tools_key: str = "tools"
    """Column with the tools' schemas, a list or JSON text; rows may lack it."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking on or off; rows may lack it."""


@dataclass
class SFTDataConfig(ConfigGroup):
    train_files: Any = None
    """Parquet, JSON or JSON-lines files to train on. Required."""
    val_files: Any = None
    """Files to validate on; null: no validation."""
    train_batch_size: int = option(256, minimum=1, unit="samples")
    """Samples per optimiser step."""
    micro_batch_size_per_gpu: int = option(4, minimum=1, unit="samples")
    """Samples per forward and backward pass on one device."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by tokens instead of by samples."""
    max_token_len_per_gpu: int = option(8192, minimum=1, unit="tokens")
    """Tokens per micro-batch then."""
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
class SFTRunConfig:
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: checkpoints, metrics, resolved config."""
    default_hdfs_dir: str | None = None
    """URL of a folder that checkpoints are copied to; null: none."""
    project_name: str = "gsm8k-sft"
    """Project under which loggers file the run."""
    experiment_name: str = "test"
    """Name of the run."""
    total_epochs: int = option(4, minimum=1, unit="epochs")
    """Passes over the training data."""
    total_training_steps: int | None = option(None, minimum=1, unit="steps")
    """Steps of the whole run; null: total_epochs times the batches of an epoch."""
    logger: Any = listed("console", "file")
    """Where metrics go: names of loggers."""
    console_metrics: Any = None
    """Metrics on the console's line of a step: `short` (about ten), `all`, or patterns such as
    [short,critic/*]; null: short where another logger keeps the rest, else all."""
    class_: str | None = None
    """The trainer: a name that is registered, or a class as my.module.MyTrainer or
    path/to/file.py:MyTrainer; null: the command's own."""
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
    resume_mode: str = option("auto", choices=("auto", "disable", "resume_path"))
    """Go on from the newest checkpoint, start anew, or go on from resume_from_path."""
    resume_from_path: str | None = None
    """A global_step_N folder or its URL, for resume_mode=resume_path."""
    resume_fallback: bool = False
    """With resume_mode=auto: where files of the newest checkpoint are damaged, go on from the one
    before it, with a warning. Otherwise that is an error."""
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
    nnodes: int = option(1, minimum=1, unit="nodes")
    """Machines of the run; under torchrun, those that it starts."""
    n_gpus_per_node: int | None = option(None, minimum=1, unit="devices")
    """Devices (GPUs, or processes on a CPU) a node; null: torchrun's processes, else all GPUs, or
    one process on a CPU."""
    worker_group: str | None = option(None, choices=("local", "ray"))
    """Where workers live: processes of this machine, or Ray's. null: Ray for several nodes, or
    where RAY_ADDRESS names a cluster; else local. Under torchrun: its processes."""
    device: str | None = option(None, choices=("cuda", "cpu"))
    """Where the model lives; null: cuda where there is a GPU, else cpu."""
    nccl_timeout: int = option(600, minimum=1, unit="seconds")
    """How long a call may take on the workers, and a rank wait for another."""
    ray_wait_register_center_timeout: int = option(300, minimum=1, unit="seconds")
    """How long to wait for places that other runs hold on a Ray cluster, and for ranks to start."""


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
