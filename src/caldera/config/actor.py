"""The keys of the policy's update and of its reference."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II

from caldera.config.algorithm import KL_TYPES
from caldera.config.fields import ConfigGroup, nested, option, refused
from caldera.config.megatron import MegatronConfig, RefMegatronConfig
from caldera.config.optim import CheckpointConfig, FSDPConfig, OptimizerConfig, RefFSDPConfig
from caldera.config.profiling import ProfilerConfig
from caldera.config.reasons import (
    COMPUTED_HEAD,
    NO_IMAGES,
    NO_ROUTER_REPLAY,
    WEIGHTS_ARE_READ,
)
from caldera.config.rollout_correction import RolloutCorrectionConfig

STRATEGIES = ("local", "fsdp", "fsdp2", "megatron")
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


@dataclass
class PolicyLossConfig(ConfigGroup):
    loss_mode: str = "vanilla"
    """Name of the policy loss, or `file.py:function` of a custom one."""
    clip_cov_ratio: float = option(0.0002, minimum=0, maximum=1, unit="share of tokens")
    """clip_cov: tokens that are taken out of the loss."""
    clip_cov_lb: float = 1.0
    """clip_cov: least covariance of a token that may be taken out."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of a token that may be taken out."""
    kl_cov_ratio: float = option(0.0002, minimum=0, maximum=1, unit="share of tokens")
    """kl_cov: tokens, by covariance, that are held near the old policy."""
    ppo_kl_coef: float = 0.1
    """kl_cov: weight of that hold."""
    dro_beta: float | None = option(None, minimum=0)
    """dro: weight of the squared log-ratio; required there."""
    rollout_correction: RolloutCorrectionConfig = II("algorithm.rollout_correction")
    """bypass_mode: follows algorithm.rollout_correction, which is the place to set it."""


@dataclass
class RouterReplayConfig:
    mode: str = refused("disabled", NO_ROUTER_REPLAY)
    record_file: str | None = refused(None, NO_ROUTER_REPLAY)
    replay_file: str | None = refused(None, NO_ROUTER_REPLAY)


@dataclass
class ActorConfig(ConfigGroup):
    strategy: str = option("fsdp", choices=STRATEGIES)
    """Training engine. In one process fsdp and fsdp2 are `local`: there is nothing to shard."""
    rollout_n: int = II("actor_rollout_ref.rollout.n")
    """Follows rollout.n, which is the place to set it."""
    ppo_mini_batch_size: int | None = option(None, minimum=1, unit="prompts")
    """Prompts per optimiser step; each brings rollout.n samples. null: 256 where that divides
    data.train_batch_size, else the whole batch."""
    ppo_micro_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Deprecated: samples per pass over all devices; replaced by ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward and backward pass on one device."""
    use_dynamic_bsz: bool | None = None
    """Form micro-batches by tokens instead of by samples; null: where no size in samples is
    given."""
    ppo_max_token_len_per_gpu: int | None = option(None, minimum=1, unit="tokens")
    """Most tokens of a micro-batch formed by tokens; null: 16384, on a CPU 4096, and at least the
    longest sample."""
    clip_ratio: float = option(0.2, minimum=0)
    """Distance from 1 at which the probability ratio is clipped."""
    clip_ratio_low: float | None = option(II(".clip_ratio"), minimum=0)
    """Distance below 1."""
    clip_ratio_high: float | None = option(II(".clip_ratio"), minimum=0)
    """Distance above 1."""
    clip_ratio_c: float = option(3.0, minimum=1)
    """Bound of the ratio for negative advantages (dual clip)."""
    tau_pos: float = option(1.0, minimum=0)
    """sapo: temperature of the soft gate for positive advantages."""
    tau_neg: float = option(1.05, minimum=0)
    """sapo: temperature of the soft gate for negative advantages."""
    freeze_vision_tower: bool = refused(False, NO_IMAGES)
    policy_loss: PolicyLossConfig = nested(PolicyLossConfig)
    loss_agg_mode: str = option("token-mean", choices=LOSS_AGG_MODES)
    """How losses of tokens become one number."""
    loss_scale_factor: float | None = option(None, unit="tokens")
    """Divisor of seq-mean-token-sum-norm; null: the response length."""
    classic_loss_normalization: bool = False
    """Average the loss in each micro-batch, as verl 0.7 does, so that it depends on the split."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = False
    """Compute the entropy in the update even when entropy_coeff is 0."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities, which optimal_token_baseline needs."""
    sum_pi_squared_checkpointing: bool = refused(False, COMPUTED_HEAD, met=(True,))
    use_kl_loss: bool = False
    """Add the distance to the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that distance."""
    kl_loss_type: str = option("low_var_kl", choices=KL_TYPES)
    """Estimator of that distance; `full` sums over the vocabulary; a trailing + gives an estimate
    the gradient of the squared one."""
    use_prefix_grouper: bool = refused(False, "prompts are computed once a sample")
    use_torch_compile: bool = True
    """Compile the decoder layers for training, on a GPU. Megatron's are not compiled."""
    use_fused_kernels: bool = refused(
        II("actor_rollout_ref.model.use_fused_kernels"), COMPUTED_HEAD
    )
    use_remove_padding: bool = refused(
        II("actor_rollout_ref.model.use_remove_padding"), "set it in actor_rollout_ref.model"
    )
    ppo_epochs: int = option(1, minimum=1)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    grad_clip: float = option(1.0, minimum=0)
    """Largest gradient norm of an optimiser step; 0: no clipping."""
    ulysses_sequence_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the tokens of each micro-batch."""
    entropy_from_logits_with_chunking: bool = refused(False, COMPUTED_HEAD, met=(True,))
    entropy_checkpointing: bool = refused(False, COMPUTED_HEAD, met=(True,))
    state_masking: bool = False
    """With do_search, true is what always holds: passages that a search brought are not trained
    on."""
    load_weight: bool = refused(True, WEIGHTS_ARE_READ)
    checkpoint: CheckpointConfig = nested(CheckpointConfig)
    optim: OptimizerConfig = nested(OptimizerConfig)
    fsdp_config: FSDPConfig = nested(FSDPConfig)
    megatron: MegatronConfig = nested(MegatronConfig)
    profiler: ProfilerConfig = nested(ProfilerConfig)
    router_replay: RouterReplayConfig = nested(RouterReplayConfig)


@dataclass
class RefConfig(ConfigGroup):
    strategy: str = option(II("actor_rollout_ref.actor.strategy"), choices=STRATEGIES)
    """Engine of the reference."""
    rollout_n: int = II("actor_rollout_ref.rollout.n")
    """Follows rollout.n, which is the place to set it."""
    use_torch_compile: bool = True
    """Compile the decoder layers for training, on a GPU. Megatron's are not compiled."""
    log_prob_micro_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Deprecated: samples per pass over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward pass on one device."""
    log_prob_use_dynamic_bsz: bool | None = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form micro-batches by tokens instead of by samples; null: where no size in samples is
    given."""
    log_prob_max_token_len_per_gpu: int | None = option(
        II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"), minimum=1, unit="tokens"
    )
    """Tokens per micro-batch then."""
    ulysses_sequence_parallel_size: int = option(
        II("actor_rollout_ref.actor.ulysses_sequence_parallel_size"), minimum=1, unit="ranks"
    )
    """Ranks that share the tokens of each micro-batch."""
    entropy_from_logits_with_chunking: bool = refused(False, COMPUTED_HEAD, met=(True,))
    entropy_checkpointing: bool = refused(False, COMPUTED_HEAD, met=(True,))
    load_weight: bool = refused(True, WEIGHTS_ARE_READ)
    fsdp_config: RefFSDPConfig = nested(RefFSDPConfig)
    megatron: RefMegatronConfig = nested(RefMegatronConfig)
    profiler: ProfilerConfig = nested(ProfilerConfig)
    router_replay: RouterReplayConfig = nested(RouterReplayConfig)
