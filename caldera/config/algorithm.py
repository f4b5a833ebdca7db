"""The keys of advantages and of the KL in the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import nested, option, refused

KL_TYPES = (
    *("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    *("kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"),
)
NO_CORRECTION = "rollout correction is not part of this release"
NO_SEARCH = "the search agent is not part of this release"


@dataclass
class KLControlConfig:
    type: str = option("fixed", choices=("fixed", "adaptive"))
    """Whether the coefficient stays or follows target_kl."""
    kl_coef: float = option(0.001, minimum=0)
    """First value of the coefficient."""
    horizon: float = 10000
    """Samples over which the adaptive controller corrects."""
    target_kl: float = option(0.1, minimum=0)
    """Distance that the adaptive controller aims at."""


@dataclass
class RolloutCorrectionConfig:
    rollout_is: str | None = refused(None, NO_CORRECTION)
    rollout_is_threshold: Any = refused(2.0, NO_CORRECTION)
    rollout_rs: str | None = refused(None, NO_CORRECTION)
    rollout_rs_threshold: Any = refused(None, NO_CORRECTION)
    bypass_mode: bool = refused(False, NO_CORRECTION)


@dataclass
class StateMaskingConfig:
    start_state_marker: str = refused("<information>", NO_SEARCH)
    end_state_marker: str = refused("</information>", NO_SEARCH)


@dataclass
class FilterGroupsConfig:
    enable: bool = refused(False, "dynamic sampling is not part of this release")


@dataclass
class AlgorithmConfig:
    gamma: float = option(1.0, minimum=0, maximum=1)
    """Discount of later rewards."""
    lam: float = option(1.0, minimum=0, maximum=1)
    """GAE's trade-off of bias and variance."""
    adv_estimator: str = "gae"
    """Name of the advantage estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation; false: Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract the distance to the reference from the reward."""
    kl_penalty: str = option("kl", choices=KL_TYPES)
    """Estimator of that distance; a trailing + gives it the gradient of the squared one."""
    kl_ctrl: KLControlConfig = nested(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = nested(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = nested(FilterGroupsConfig)
    state_masking: StateMaskingConfig = nested(StateMaskingConfig)
    use_pf_ppo: bool = refused(False, "reweighting of samples is not part of this release")
