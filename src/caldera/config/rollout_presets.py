"""Rollout correction by name, and the check of its keys.

Names of presets say what they do: `decoupled` recomputes the old log-probs and `bypass` takes the
sampler's; `is` and `tis` weigh, `rs` rejects; `geo` is the geometric mean of a sequence's ratios.
Their bounds are a start for tuning:

    bound of                    value        keeps
    weights                     2.0          weights above it are cut to it
    weights, icepop             0.5_5.0      weights outside become 0
    seq_sum_k1  (seq_is_rs)     0.5_2.0      sequences with a ratio in there
    seq_mean_k1 (geo_rs)        0.999_1.001  sequences with a geometric mean ratio in there
    seq_mean_k3 (k3_rs)         0.01         sequences with a mean k3 up to it
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from caldera.config.algorithm import RolloutCorrectionConfig
from caldera.config.rollout_correction import (
    KEY,
    check_is_level,
    parse_rejections,
    parse_weight_bounds,
)
from caldera.errors import ConfigError, nearest

__all__ = [
    "ROLLOUT_CORRECTION_PRESETS",
    "check_rollout_correction",
    "rollout_correction_preset",
]

logger = logging.getLogger(__name__)

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
