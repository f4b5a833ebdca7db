"""The keys of the policy's update and of its reference."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II

from caldera.config.algorithm import KL_TYPES, NO_SEARCH
from caldera.config.fields import nested, option, refused
from caldera.config.model import (
    LOG_PROBS_CHUNKED,
    NEEDS_SHARDING,
    CheckpointConfig,
    FSDPConfig,
    OptimizerConfig,
)

STRATEGIES = ("local", "fsdp", "fsdp2", "megatron")
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Name of the policy loss."""


@dataclass
class ActorConfig:
    strategy: str = option("fsdp", choices=STRATEGIES)
    """Training engine. In one process fsdp and fsdp2 have nothing to shard and are `local`."""
    ppo_mini_batch_size: int = option(256, minimum=1)
    """Prompts per optimiser step; each brings rollout.n samples."""
    ppo_micro_batch_size: int | None = refused(None, "use ppo_micro_batch_size_per_gpu")
    ppo_micro_batch_size_per_gpu: int | None = option(None, minimum=1)
    """Samples per forward and backward pass on one device."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by tokens instead of by samples."""
    ppo_max_token_len_per_gpu: int = option(16384, minimum=1)
    """Tokens per micro-batch when use_dynamic_bsz is on."""
    clip_ratio: float = option(0.2, minimum=0)
    """Distance from 1 at which the probability ratio is clipped."""
    clip_ratio_low: float | None = II(".clip_ratio")
    """Distance below 1."""
    clip_ratio_high: float | None = II(".clip_ratio")
    """Distance above 1."""
    clip_ratio_c: float = option(3.0, minimum=1)
    """Bound of the ratio for negative advantages (dual clip)."""
    policy_loss: PolicyLossConfig = nested(PolicyLossConfig)
    loss_agg_mode: str = option("token-mean", choices=LOSS_AGG_MODES)
    """How losses of tokens become one number."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; null: the response length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Compute the entropy in the update even when entropy_coeff is 0."""
    use_kl_loss: bool = False
    """Add the distance to the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that distance."""
    kl_loss_type: str = option("low_var_kl", choices=KL_TYPES)
    """Estimator of that distance; a trailing + gives it the gradient of the squared one."""
    use_torch_compile: bool = refused(True, "the chunked head is not compiled; leave the key out")
    ppo_epochs: int = option(1, minimum=1)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    grad_clip: float = option(1.0, minimum=0)
    """Largest gradient norm of an optimiser step; 0: no clipping."""
    ulysses_sequence_parallel_size: int = refused(1, NEEDS_SHARDING)
    entropy_from_logits_with_chunking: bool = refused(False, LOG_PROBS_CHUNKED)
    entropy_checkpointing: bool = refused(False, LOG_PROBS_CHUNKED)
    state_masking: bool = refused(False, NO_SEARCH)
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
    optim: OptimizerConfig = nested(OptimizerConfig)
    fsdp_config: FSDPConfig = nested(FSDPConfig)


@dataclass
class RefConfig:
    strategy: str = option(II("actor_rollout_ref.actor.strategy"), choices=STRATEGIES)
    """Engine of the reference."""
    log_prob_micro_batch_size: int | None = refused(None, "use log_prob_micro_batch_size_per_gpu")
    log_prob_micro_batch_size_per_gpu: int | None = option(None, minimum=1)
    """Samples per forward pass on one device."""
    log_prob_use_dynamic_bsz: bool = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form micro-batches by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: int = II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens per micro-batch then."""
    fsdp_config: FSDPConfig = nested(FSDPConfig)
