"""Reads the values of `algorithm.rollout_correction.*`, for the checks and for the mathematics.

A bound is a positive number, as a number or as text, or two of them in one text, `lo_hi`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from caldera.errors import ConfigError

__all__ = [
    "IS_LEVELS",
    "RS_STATISTICS",
    "Rejection",
    "WeightBounds",
    "check_is_level",
    "parse_rejections",
    "parse_weight_bounds",
]

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
