"""The keys of the critic."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II

from caldera.config.actor import LOSS_AGG_MODES, STRATEGIES
from caldera.config.fields import nested, option, refused
from caldera.config.model import (
    NEEDS_SHARDING,
    CheckpointConfig,
    CriticModelConfig,
    CriticOptimizerConfig,
)


@dataclass
class CriticConfig:
    enable: bool | None = None
    """Train a critic; null: when the advantage estimator needs one."""
    strategy: str = option("fsdp", choices=STRATEGIES)
    """Training engine of the critic."""
    optim: CriticOptimizerConfig = nested(CriticOptimizerConfig)
    model: CriticModelConfig = nested(CriticModelConfig)
    ppo_mini_batch_size: int = II("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts per optimiser step."""
    ppo_micro_batch_size: int | None = refused(None, "use ppo_micro_batch_size_per_gpu")
    ppo_micro_batch_size_per_gpu: int | None = option(None, minimum=1)
    """Samples per forward and backward pass on one device."""
    use_dynamic_bsz: bool = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form micro-batches by tokens instead of by samples."""
    ppo_max_token_len_per_gpu: int = option(32768, minimum=1)
    """Tokens per micro-batch then."""
    forward_micro_batch_size_per_gpu: int | None = II(".ppo_micro_batch_size_per_gpu")
    """Samples per forward pass when values are computed."""
    forward_max_token_len_per_gpu: int = II(".ppo_max_token_len_per_gpu")
    """Tokens per forward pass then."""
    ppo_epochs: int = II("actor_rollout_ref.actor.ppo_epochs")
    """Passes over each batch."""
    shuffle: bool = II("actor_rollout_ref.actor.shuffle")
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    cliprange_value: float = option(0.5, minimum=0)
    """Distance from the old value at which the new one is clipped."""
    loss_agg_mode: str = option(II("actor_rollout_ref.actor.loss_agg_mode"), choices=LOSS_AGG_MODES)
    """How losses of tokens become one number."""
    grad_clip: float = option(1.0, minimum=0)
    """Largest gradient norm of an optimiser step; 0: no clipping."""
    ulysses_sequence_parallel_size: int = refused(1, NEEDS_SHARDING)
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
