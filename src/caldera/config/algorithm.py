"""The keys of advantages and of the KL in the reward."""

from __future__ import annotations

from dataclasses import dataclass

from caldera.config.fields import ConfigGroup, nested, option, refused
from caldera.config.rollout_correction import RolloutCorrectionConfig

KL_TYPES = (
    *("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"),
    *("kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"),
)


@dataclass
class KLControlConfig(ConfigGroup):
    type: str = option("fixed", choices=("fixed", "adaptive"))
    """Whether the coefficient stays or follows target_kl."""
    kl_coef: float = option(0.001, minimum=0)
    """First value of the coefficient."""
    horizon: float = option(10000, unit="samples")
    """Samples over which the adaptive controller corrects."""
    target_kl: float = option(0.1, minimum=0)
    """Distance that the adaptive controller aims at."""


@dataclass
class PfPpoConfig:
    reweight_method: str = option("pow", choices=("pow", "max_min", "max_random"))
    """How a sample's score becomes its chance of being drawn."""
    weight_pow: float = 2.0
    """Exponent of `pow`."""


@dataclass
class StateMaskingConfig:
    start_state_marker: str = "<information>"
    """search_agent: what stands before the passages that a search brings."""
    end_state_marker: str = "</information>"
    """search_agent: what stands behind them."""


@dataclass
class FilterGroupsConfig(ConfigGroup):
    enable: bool = False
    """Keep only prompts whose responses differ in `metric`, and sample until there are enough."""
    metric: str | None = None
    """Value by which responses are compared: acc, score, seq_reward or seq_final_reward."""
    max_num_gen_batches: int = option(0, minimum=0, unit="batches")
    """Most batches that are sampled for one step; 0: no limit."""
    max_inflight_gen_batches: int = refused(1, "one batch is sampled at a time")


@dataclass
class AlgorithmConfig(ConfigGroup):
    gamma: float = option(1.0, minimum=0, maximum=1)
    """Discount of later rewards."""
    lam: float = option(1.0, minimum=0, maximum=1)
    """GAE's trade-off of bias and variance."""
    adv_estimator: str = "gae"
    """Name of the advantage estimator, or `file.py:function` of a custom one."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation; false: Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract the distance to the reference from the reward."""
    kl_penalty: str = option("kl", choices=KL_TYPES)
    """Estimator of that distance; `full` sums over the whole vocabulary."""
    kl_ctrl: KLControlConfig = nested(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = nested(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = nested(FilterGroupsConfig)
    state_masking: StateMaskingConfig = nested(StateMaskingConfig)
    no_think_rl: bool = refused(False, "what the policy thinks is trained like all that it says")
    use_pf_ppo: bool = False
    """Resample the batch by its scores, after GAE."""
    pf_ppo: PfPpoConfig = nested(PfPpoConfig)
    gdpo_reward_keys: list[str] | None = None
    """gdpo: the scorer's values that are normalised one by one."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each of them; null: 1."""
