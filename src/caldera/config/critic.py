"""The keys of the critic."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II

from caldera.config.actor import LOSS_AGG_MODES, STRATEGIES
from caldera.config.fields import ConfigGroup, nested, option, refused
from caldera.config.megatron import MegatronConfig
from caldera.config.model import CriticModelConfig
from caldera.config.optim import CheckpointConfig, CriticOptimizerConfig
from caldera.config.profiling import ProfilerConfig
from caldera.config.reasons import ONE_TIMEOUT, WEIGHTS_ARE_READ


@dataclass
class CriticConfig(ConfigGroup):
    enable: bool | None = None
    """Train a critic; null: when the advantage estimator needs one."""
    strategy: str = option("fsdp", choices=STRATEGIES)
    """Training engine of the critic."""
    worker_class: str | None = None
    """The worker of this role: a name that is registered, or a class derived from CriticWorker, as
    my.module.MyWorker or path/to/file.py:MyWorker; null: CriticWorker."""
    rollout_n: int = II("actor_rollout_ref.rollout.n")
    """Follows rollout.n, which is the place to set it."""
    optim: CriticOptimizerConfig = nested(CriticOptimizerConfig)
    model: CriticModelConfig = nested(CriticModelConfig)
    ppo_mini_batch_size: int | None = option(
        II("actor_rollout_ref.actor.ppo_mini_batch_size"), minimum=1, unit="prompts"
    )
    """Prompts per optimiser step."""
    ppo_micro_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Deprecated: samples per pass over all devices; replaced by ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward and backward pass on one device."""
    use_dynamic_bsz: bool | None = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form micro-batches by tokens instead of by samples; null: where no size in samples is
    given."""
    ppo_max_token_len_per_gpu: int | None = option(None, minimum=1, unit="tokens")
    """Most tokens of a micro-batch formed by tokens; null: 32768, on a CPU 4096, and at least the
    longest sample."""
    forward_micro_batch_size: int | None = option(
        II(".ppo_micro_batch_size"), minimum=1, unit="samples"
    )
    """Deprecated: samples per forward pass over all devices."""
    forward_micro_batch_size_per_gpu: int | None = option(
        II(".ppo_micro_batch_size_per_gpu"), minimum=1, unit="samples"
    )
    """Samples per forward pass when values are computed."""
    forward_max_token_len_per_gpu: int | None = option(
        II(".ppo_max_token_len_per_gpu"), minimum=1, unit="tokens"
    )
    """Tokens per forward pass then."""
    ppo_epochs: int = option(II("actor_rollout_ref.actor.ppo_epochs"), minimum=1)
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
    ulysses_sequence_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the tokens of each micro-batch."""
    nccl_timeout: int = refused(600, ONE_TIMEOUT)
    load_weight: bool = refused(True, WEIGHTS_ARE_READ)
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
    megatron: MegatronConfig = nested(MegatronConfig)
    profiler: ProfilerConfig = nested(ProfilerConfig)
