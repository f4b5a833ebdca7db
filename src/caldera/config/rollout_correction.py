"""Keys of rollout correction, their values for the checks and for the mathematics, and presets.

A bound is a positive number, as a number or as text, or two of them in one text, `lo_hi`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caldera.config.fields import option
from caldera.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


@dataclass
class RolloutCorrectionConfig:
    preset: str | None = None
    """A named choice of the keys below, for keys at their defaults."""
    rollout_is: str | None = option(None, choices=("token", "sequence"))
    """Weigh the loss by train over rollout probability, a token or a sequence; null: not."""
    rollout_is_threshold: Any = 2.0
    """A number: larger weights are cut to it. `lo_hi`: weights outside become 0."""
    rollout_rs: str | None = None
    """Statistics, separated by commas, by which tokens or sequences are rejected; null: none."""
    rollout_rs_threshold: Any = None
    """Bound of these statistics: one for all, or one each, separated by commas."""
    bypass_mode: bool = False
    """Take the sampler's log-probs as old_log_probs instead of recomputing them."""
    loss_type: str = option("ppo_clip", choices=("ppo_clip", "reinforce"))
    """Policy loss of bypass_mode."""
    rollout_is_batch_normalize: bool = False
    """Scale the weights of a batch to mean 1."""


KEY = "algorithm.rollout_correction"

IS_LEVELS = ("token", "sequence")
RATIO_STATISTICS = ("token_k1", "seq_sum_k1", "seq_mean_k1")
"""Signed, so they have a bound on either side. It is given as bounds of the ratio."""
RS_STATISTICS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class WeightBounds:
    """The importance weights that are left as they are."""

    lower: float | None
    """Smaller and larger weights become 0. None: larger ones are cut to `upper`."""
    upper: float


@dataclass(frozen=True)
class Rejection:
    """A statistic, and the values of it that are kept, both ends included."""

    statistic: str
    lower: float
    upper: float


def check_is_level(rollout_is: str) -> None:
    if rollout_is not in IS_LEVELS:
        raise ConfigError(f"{KEY}.rollout_is={rollout_is!r}: takes null, {', '.join(IS_LEVELS)}")


def parse_weight_bounds(threshold: object) -> WeightBounds:
    """The bounds that `rollout_is_threshold` stands for."""
    return WeightBounds(*_parse_bound(threshold, f"{KEY}.rollout_is_threshold"))


def parse_rejections(rollout_rs: str, threshold: object) -> list[Rejection]:
    """The statistics that `rollout_rs` lists, with the bounds of `rollout_rs_threshold`.

    There is one bound for all of them or one for each, as text between commas or as a list.
    """
    statistics = [name.strip() for name in rollout_rs.split(",")]
    for position, name in enumerate(statistics):
        if name not in RS_STATISTICS:
            known = ", ".join(RS_STATISTICS)
            raise ConfigError(f"{KEY}.rollout_rs={rollout_rs!r}: {name!r} is not one of {known}")
        if name in statistics[:position]:
            raise ConfigError(f"{KEY}.rollout_rs={rollout_rs!r}: names {name!r} twice")
    if threshold is None:
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold=null: {KEY}.rollout_rs={rollout_rs!r} needs a bound: "
            "one number, 'lo_hi' for k1 statistics, or one of these for each statistic"
        )
    bounds = _as_list(threshold)
    if len(bounds) == 1:
        bounds *= len(statistics)
    if len(bounds) != len(statistics):
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold={threshold!r}: has {len(bounds)} bounds for the "
            f"{len(statistics)} statistics of {KEY}.rollout_rs={rollout_rs!r}; takes 1 or "
            f"{len(statistics)}"
        )
    return [_parse_rejection(*pair) for pair in zip(statistics, bounds, strict=True)]


def _as_list(threshold: object) -> list[object]:
    if isinstance(threshold, str):
        return [bound.strip() for bound in threshold.split(",")]
    return list(threshold) if isinstance(threshold, Sequence) else [threshold]


def _parse_rejection(statistic: str, bound: object) -> Rejection:
    key = f"{KEY}.rollout_rs_threshold"
    lower, upper = _parse_bound(bound, key)
    if statistic not in RATIO_STATISTICS:
        if lower is not None:
            raise ConfigError(
                f"{key}={bound!r}: {statistic} is never negative and takes an upper bound alone; "
                f"'lo_hi' is for {', '.join(RATIO_STATISTICS)}"
            )
        return Rejection(statistic, -math.inf, upper)
    if lower is None:
        if upper <= 1:
            raise ConfigError(
                f"{key}={bound!r}: one bound u of {statistic} keeps ratios from 1/u to u; "
                "takes a number above 1, or 'lo_hi'"
            )
        lower = 1 / upper
    # k1 is minus the logarithm of the ratio, which turns the interval around.
    return Rejection(statistic, -math.log(upper), -math.log(lower))


def _parse_bound(bound: object, key: str) -> tuple[float | None, float]:
    """`hi` as (None, hi), and `lo_hi` as (lo, hi)."""
    try:
        numbers = [float(number) for number in str(bound).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigError(f"{key}={bound!r}: takes a positive number, or two of them as 'lo_hi'")
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ConfigError(f"{key}={bound!r}: bounds must be finite and greater than 0")
    if len(numbers) == 1:
        return None, numbers[0]
    lower, upper = numbers
    if lower >= upper:
        raise ConfigError(f"{key}={bound!r}: in 'lo_hi', lo must be smaller than hi")
    return lower, upper


# ---- Presets

# Names of presets say what they do: `decoupled` recomputes the old log-probs and `bypass` takes the
# sampler's; `is` and `tis` weigh, `rs` rejects; `geo` is the geometric mean of a sequence's ratios.
# Their bounds are a start for tuning:
#
#     bound of                    value        keeps
#     weights                     2.0          weights above it are cut to it
#     weights, icepop             0.5_5.0      weights outside become 0
#     seq_sum_k1  (seq_is_rs)     0.5_2.0      sequences with a ratio in there
#     seq_mean_k1 (geo_rs)        0.999_1.001  sequences with a geometric mean ratio in there
#     seq_mean_k3 (k3_rs)         0.01         sequences with a mean k3 up to it

_TOKEN_TIS: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_TIS: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SEQ_RS: dict[str, Any] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_PPO_CLIP: dict[str, Any] = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

ROLLOUT_CORRECTION_PRESETS: dict[str, RolloutCorrectionConfig] = {
    "disabled": RolloutCorrectionConfig(),
    "decoupled_token_is": RolloutCorrectionConfig(**_TOKEN_TIS),
    "decoupled_seq_is": RolloutCorrectionConfig(**_SEQ_TIS),
    "decoupled_token_icepop": RolloutCorrectionConfig(**_ICEPOP),
    "decoupled_seq_is_rs": RolloutCorrectionConfig(**_SEQ_TIS, **_SEQ_RS),
    "decoupled_geo_rs": RolloutCorrectionConfig(**_GEO_RS),
    "decoupled_geo_rs_seq_tis": RolloutCorrectionConfig(**_GEO_RS, **_SEQ_TIS),
    "decoupled_geo_rs_token_tis": RolloutCorrectionConfig(**_GEO_RS, **_TOKEN_TIS),
    "decoupled_k3_rs": RolloutCorrectionConfig(**_K3_RS),
    "decoupled_k3_rs_seq_tis": RolloutCorrectionConfig(**_K3_RS, **_SEQ_TIS),
    "decoupled_k3_rs_token_tis": RolloutCorrectionConfig(**_K3_RS, **_TOKEN_TIS),
    "bypass_ppo_clip": RolloutCorrectionConfig(**_PPO_CLIP),
    "bypass_ppo_clip_geo_rs": RolloutCorrectionConfig(**_PPO_CLIP, **_GEO_RS),
    "bypass_ppo_clip_k3_rs": RolloutCorrectionConfig(**_PPO_CLIP, **_K3_RS),
    "bypass_pg_is": RolloutCorrectionConfig(**_REINFORCE, **_SEQ_TIS),
    "bypass_pg_token_icepop": RolloutCorrectionConfig(**_REINFORCE, **_ICEPOP),
    "bypass_pg_geo_rs": RolloutCorrectionConfig(**_REINFORCE, **_GEO_RS),
    "bypass_pg_geo_rs_seq_tis": RolloutCorrectionConfig(**_REINFORCE, **_GEO_RS, **_SEQ_TIS),
    "bypass_pg_geo_rs_token_tis": RolloutCorrectionConfig(**_REINFORCE, **_GEO_RS, **_TOKEN_TIS),
}


def rollout_correction_preset(name: str) -> RolloutCorrectionConfig:
    """A copy of the preset, which the caller may change."""
    if name not in ROLLOUT_CORRECTION_PRESETS:
        guess = nearest(name, ROLLOUT_CORRECTION_PRESETS)
        hint = f"; did you mean {guess}?" if guess else ""
        known = ", ".join(ROLLOUT_CORRECTION_PRESETS)
        raise ConfigError(f"{KEY}.preset={name!r}: takes one of {known}{hint}")
    return dataclasses.replace(ROLLOUT_CORRECTION_PRESETS[name])


def check_rollout_correction(config: RolloutCorrectionConfig) -> None:
    """The values can be read and fit together, or the first that does not raises ConfigError."""
    if config.rollout_is is not None:
        check_is_level(config.rollout_is)
        if parse_weight_bounds(config.rollout_is_threshold).upper < 1:
            logger.warning(
                "%s.rollout_is_threshold=%s changes weights of 1, those of samples that need no "
                "correction; where 'lo_hi' was meant, write a point into both: 0.5_5 is read as "
                "the number 0.55, and 0.5_5.0 as two",
                KEY,
                config.rollout_is_threshold,
            )
    if config.rollout_rs is not None:
        parse_rejections(config.rollout_rs, config.rollout_rs_threshold)
