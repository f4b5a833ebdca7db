"""The keys of optimisers, of precision and memory, and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import ConfigGroup, listed, mapping, nested, option, precision, refused
from caldera.config.reasons import COMPUTED_HEAD, DECIDED_BY_ROLE

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class OptimizerConfig(ConfigGroup):
    optimizer: str = "AdamW"
    """Class name of the optimiser; megatron: adam, which is AdamW, or sgd."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the class."""
    lr: float = option(1e-6, minimum=0)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = option(0.0, minimum=0, maximum=1, unit="share of steps")
    """Warm-up as a share of all steps; used when lr_warmup_steps is negative."""
    lr_warmup_steps: int = option(-1, unit="steps")
    """Warm-up in steps; negative: taken from lr_warmup_steps_ratio."""
    total_training_steps: int = option(-1, unit="steps")
    """Length of the schedule; the trainer fills it in."""
    weight_decay: float = option(0.01, minimum=0)
    """Decoupled weight decay."""
    betas: list[float] = listed(0.9, 0.999)
    """Decay rates of Adam's averages."""
    clip_grad: float = option(1.0, minimum=0)
    """megatron: largest gradient norm of an optimiser step; 0: no clipping. The others' key is the
    role's own grad_clip."""
    min_lr_ratio: float = option(0.0, minimum=0, maximum=1, unit="share of lr")
    """Floor of the cosine schedule."""
    num_cycles: float = option(0.5, unit="cycles")
    """Cycles of the cosine schedule."""
    lr_scheduler_type: str = option("constant", choices=("constant", "cosine"))
    """Shape of the schedule after the warm-up."""
    warmup_style: str | None = option(None, choices=("constant", "cosine"))
    """Older name of lr_scheduler_type; wins when set."""
    override_optimizer_config: dict[str, Any] | None = mapping()
    """Further arguments of the optimiser's class."""
    lr_warmup_init: float = option(0.0, minimum=0)
    """megatron: learning rate at which the warm-up begins."""
    lr_decay_steps: int | None = option(None, minimum=1, unit="steps")
    """megatron: step at which min_lr is reached; null: the last."""
    lr_decay_style: str = option("constant", choices=LR_DECAY_STYLES)
    """megatron: shape of the schedule after the warm-up."""
    min_lr: float = option(0.0, minimum=0)
    """megatron: learning rate at which the schedule ends."""
    weight_decay_incr_style: str = refused(
        "constant", "weight decay begins and ends at weight_decay", met=("linear", "cosine")
    )
    lr_wsd_decay_style: str = option("exponential", choices=LR_WSD_DECAY_STYLES)
    """megatron: shape of the last steps of WSD."""
    lr_wsd_decay_steps: int | None = option(None, minimum=1, unit="steps")
    """megatron: last steps of WSD, in which the learning rate falls; required there."""
    use_checkpoint_opt_param_scheduler: bool = refused(
        False, "the step of a schedule comes from the checkpoint, its shape from the config"
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = option(1e-5, minimum=0)
    """Peak learning rate."""


@dataclass
class WrapPolicyConfig:
    min_num_params: int = option(0, minimum=0, unit="parameters")
    """Parts with at least so many parameters are gathered and dropped whole; 0: decoder layers."""


@dataclass
class FSDPConfig(ConfigGroup):
    """Precision and memory of one role's model."""

    wrap_policy: WrapPolicyConfig = nested(WrapPolicyConfig)
    param_offload: bool = False
    """Keep parameters in host memory between phases (on a GPU)."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in host memory between updates (on a GPU)."""
    grad_offload: bool = refused(
        False, "gradients are freed after every update; leave the key out", met=(True,)
    )
    offload_policy: bool = False
    """fsdp2: parameters, gradients and optimiser live in host memory, and steps are taken there."""
    reshard_after_forward: bool = True
    """Drop gathered parameters after the forward pass, and gather them again for the backward."""
    fsdp_size: int = option(-1, minimum=-1, unit="ranks")
    """Ranks that a copy of the model is sharded over; -1: all of them."""
    forward_prefetch: bool = False
    """Gather the next layer's parameters while a layer computes."""
    model_dtype: str = precision("fp32", short=True)
    """Precision in which parameters are kept and updated."""
    dtype: str | None = precision(None)
    """Precision of the computation; null: bfloat16 on CUDA, float32 on a CPU."""
    seed: int = 42
    """Seed of freshly initialised weights, such as a value head or an adapter."""
    use_orig_params: bool = False
    """fsdp: keep parameters apart instead of one flat tensor a layer; always so with an adapter."""
    tensor_parallel_size: int = option(1, minimum=1, unit="ranks")
    """fsdp2: ranks that share the matrices of each layer."""
    full_determinism: bool = refused(False, "kernels are those that torch picks")
    ulysses_sequence_parallel_size: int = refused(
        1, "the role's own ulysses_sequence_parallel_size decides"
    )
    entropy_from_logits_with_chunking: bool = refused(False, COMPUTED_HEAD, met=(True,))
    use_torch_compile: bool = True
    """Compile the decoder layers for training, on a GPU, unless the role's key says no."""
    entropy_checkpointing: bool = refused(False, COMPUTED_HEAD, met=(True,))
    forward_only: bool = refused(False, DECIDED_BY_ROLE)
    strategy: str = refused("fsdp", DECIDED_BY_ROLE, met=("fsdp2",))


@dataclass
class RefFSDPConfig(FSDPConfig):
    forward_only: bool = refused(True, DECIDED_BY_ROLE)


@dataclass
class CheckpointConfig:
    save_contents: list[str] = listed("model", "optimizer", "extra")
    """What a checkpoint holds; `hf_model` adds a Hugging Face folder with weights."""
    load_contents: list[str] = II(".save_contents")
    """What is read back on resume."""
    async_save: bool = False
    """Write checkpoints while the next steps are taken."""
    layout: str = option("dist", choices=("dist", "classic"))
    """Files: PyTorch's distributed checkpoint, or verl's classic ones, a file for each rank."""
