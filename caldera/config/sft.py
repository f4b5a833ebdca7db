"""The configuration of supervised fine-tuning, under verl's key names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.data import CustomClassConfig
from caldera.config.fields import listed, mapping, nested, option
from caldera.config.optim import CheckpointConfig, FSDPConfig


@dataclass
class MultiTurnDataConfig:
    enable: bool = False
    """Rows hold whole conversations instead of a prompt and an answer."""
    messages_key: str = "messages"
    """Column with the messages."""
    tools_key: str = "tools"
    """Column with the tools' schemas."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches the template's thinking on or off."""


@dataclass
class SFTDataConfig:
    train_files: Any = None
    """Parquet files to train on. Required."""
    val_files: Any = None
    """Parquet files to validate on; null: no validation."""
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
    max_length: int = option(1024, minimum=1, unit="tokens")
    """Most tokens of a sample."""
    truncation: str = option("error", choices=("error", "left", "right"))
    """What happens to a sample that is too long: an error, or which part is cut away."""
    balance_dp_token: bool = False
    """Deal samples to ranks so that all have the same number of tokens."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    custom_cls: CustomClassConfig = nested(CustomClassConfig)
    apply_chat_template_kwargs: dict[str, Any] = mapping()
    """Further arguments of the chat template."""


@dataclass
class SFTModelConfig:
    partial_pretrain: str | None = None
    """Folder or hub name of the model to start from. Required."""
    fsdp_config: FSDPConfig = nested(FSDPConfig)
    external_lib: str | None = None
    """Modules, separated by commas, that are imported before the model is built."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass to save memory."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    lora_rank: int = option(0, minimum=0)
    """Rank of the LoRA adapter; 0 trains all parameters."""
    lora_alpha: int = option(16, minimum=1)
    """Scale of the LoRA adapter."""
    target_modules: Any = "all-linear"
    """Module names that get an adapter: a list, or `all-linear`."""
    use_liger: bool = False
    """Use Liger's kernels."""
    strategy: str = option("fsdp2", choices=("local", "fsdp", "fsdp2"))
    """Training engine."""


@dataclass
class SFTOptimizerConfig:
    lr: float = option(1e-5, minimum=0)
    """Peak learning rate."""
    betas: list[float] = listed(0.9, 0.95)
    """Decay rates of Adam's averages."""
    weight_decay: float = option(0.01, minimum=0)
    """Decoupled weight decay."""
    lr_warmup_steps_ratio: float = option(0.1, minimum=0, maximum=1, unit="share of steps")
    """Warm-up as a share of all steps."""
    clip_grad: float = option(1.0, minimum=0)
    """Largest gradient norm of an optimiser step; 0: no clipping."""
    lr_scheduler: str = option("cosine", choices=("constant", "cosine"))
    """Shape of the schedule after the warm-up."""


@dataclass
class SFTRunConfig:
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run."""
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
    seed: int = 1
    """Seed of the order of the data and of fresh weights."""
    save_freq: Any = option(-1, unit="steps")
    """Steps between checkpoints; -1: none; `after_each_epoch`."""
    test_freq: Any = option(-1, unit="steps")
    """Steps between validations; -1: none; `after_each_epoch`."""
    max_ckpt_to_keep: int | None = option(None, minimum=1, unit="checkpoints")
    """Newest checkpoints that are kept; null: all."""
    resume_mode: str = option("auto", choices=("auto", "disable", "resume_path"))
    """Go on from the newest checkpoint, start anew, or go on from resume_from_path."""
    resume_from_path: str | None = None
    """A global_step_N folder, for resume_mode=resume_path."""
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
    nnodes: int = option(1, minimum=1, unit="nodes")
    """Machines of the run."""
    n_gpus_per_node: int | None = option(None, minimum=1, unit="devices")
    """Devices a node; null: chosen from the machine."""
    device: str | None = option(None, choices=("cuda", "cpu"))
    """Where the model lives; null: cuda where there is a GPU, else cpu."""


@dataclass
class SFTTrainerConfig:
    data: SFTDataConfig = nested(SFTDataConfig)
    model: SFTModelConfig = nested(SFTModelConfig)
    optim: SFTOptimizerConfig = nested(SFTOptimizerConfig)
    ulysses_sequence_parallel_size: int = option(1, minimum=1, unit="devices")
    """Devices that share one sequence."""
    use_remove_padding: bool = False
    """Pack sequences without padding."""
    trainer: SFTRunConfig = nested(SFTRunConfig)
