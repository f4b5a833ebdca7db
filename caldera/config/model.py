"""The keys of a model, its optimiser, its memory and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import listed, mapping, nested, option, refused

ALWAYS_PACKED = "sequences are always packed without padding; leave the key out"
NEEDS_SHARDING = "the FSDP engine is not part of this release; one process holds the whole model"
LOG_PROBS_CHUNKED = "log-probs and entropy always come from the chunked head; leave the key out"
CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class ModelConfig:
    path: str | None = None
    """Folder or hub name of the Hugging Face model. Required."""
    hf_config_path: str | None = refused(None, "the config comes from model.path")
    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; null: model.path."""
    use_shm: bool = refused(False, "weights are read from where they are")
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    custom_chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    external_lib: str | None = None
    """Modules, separated by commas, that are imported before the model is built."""
    override_config: dict[str, Any] = mapping()
    """Values that replace those of the model's config.json."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass to save memory."""
    enable_activation_offload: bool = refused(False, NEEDS_SHARDING)
    use_remove_padding: bool = refused(True, ALWAYS_PACKED)
    lora_rank: int = option(0, minimum=0)
    """Rank of the LoRA adapter; 0 trains all parameters."""
    lora_alpha: int = option(16, minimum=1)
    """Scale of the LoRA adapter."""
    target_modules: Any = "all-linear"
    """Module names that get an adapter: a list, or `all-linear`."""
    exclude_modules: Any = None
    """Module names that get none: a list or a regular expression."""
    lora_adapter_path: str | None = refused(None, "training starts from a fresh adapter")
    use_liger: bool = refused(False, "Liger kernels are not part of this release")
    use_fused_kernels: bool = refused(False, LOG_PROBS_CHUNKED)


@dataclass
class CriticModelConfig(ModelConfig):
    path: str | None = II("actor_rollout_ref.model.path")
    """Folder or hub name of the model that the critic starts from."""
    tokenizer_path: str | None = II("actor_rollout_ref.model.path")
    """Folder or hub name of the tokenizer."""
    external_lib: str | None = II("actor_rollout_ref.model.external_lib")
    """Modules that are imported before the model is built."""
    trust_remote_code: bool = II("actor_rollout_ref.model.trust_remote_code")
    """Whether code that comes with the model may run."""
    fsdp_config: FSDPConfig = nested(lambda: FSDPConfig())
    """Precision and memory of the critic."""


@dataclass
class WrapPolicyConfig:
    min_num_params: int = refused(0, NEEDS_SHARDING)


@dataclass
class FSDPConfig:
    wrap_policy: WrapPolicyConfig = nested(WrapPolicyConfig)
    param_offload: bool = False
    """Keep parameters in host memory between phases (on a GPU)."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in host memory between updates (on a GPU)."""
    offload_policy: bool = refused(False, NEEDS_SHARDING)
    reshard_after_forward: bool = refused(True, NEEDS_SHARDING)
    fsdp_size: int = refused(-1, NEEDS_SHARDING)
    forward_prefetch: bool = refused(False, NEEDS_SHARDING)
    model_dtype: str = option("fp32", choices=("fp32", "bf16"))
    """Precision in which parameters are kept and updated."""
    dtype: str | None = option(None, choices=("float32", "bfloat16"))
    """Precision of the computation; null: bfloat16 on CUDA, float32 on a CPU."""
    seed: int = 42
    """Seed of freshly initialised weights, such as a value head or an adapter."""


@dataclass
class OptimizerConfig:
    optimizer: str = "AdamW"
    """Class name of the optimiser."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the class."""
    lr: float = option(1e-6, minimum=0)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = option(0.0, minimum=0, maximum=1)
    """Warm-up as a share of all steps; used when lr_warmup_steps is negative."""
    lr_warmup_steps: int = -1
    """Warm-up in steps; negative: taken from lr_warmup_steps_ratio."""
    total_training_steps: int = -1
    """Length of the schedule in steps; the trainer fills it in."""
    weight_decay: float = option(0.01, minimum=0)
    """Decoupled weight decay."""
    betas: list[float] = listed(0.9, 0.999)
    """Decay rates of Adam's averages."""
    min_lr_ratio: float = option(0.0, minimum=0, maximum=1)
    """Floor of the cosine schedule as a share of lr."""
    num_cycles: float = 0.5
    """Cycles of the cosine schedule."""
    lr_scheduler_type: str = option("constant", choices=("constant", "cosine"))
    """Shape of the schedule after the warm-up."""
    warmup_style: str | None = option(None, choices=("constant", "cosine"))
    """Older name of lr_scheduler_type; wins when set."""
    override_optimizer_config: dict[str, Any] | None = mapping()
    """Further arguments of the optimiser's class."""


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = option(1e-5, minimum=0)
    """Peak learning rate."""


@dataclass
class CheckpointConfig:
    save_contents: list[str] = listed("model", "optimizer", "extra")
    """What a checkpoint holds; `hf_model` adds a Hugging Face folder with weights."""
    load_contents: list[str] = II(".save_contents")
    """What is read back on resume."""
    async_save: bool = refused(False, "checkpoints are written before the next step starts")
