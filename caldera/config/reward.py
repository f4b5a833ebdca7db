"""The keys of scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import mapping, refused

NO_REWARD_MODEL = "reward models are not part of this release"


@dataclass
class RewardModelConfig:
    enable: bool = refused(False, NO_REWARD_MODEL)
    enable_resource_pool: bool = refused(False, NO_REWARD_MODEL)
    reward_manager: str = "naive"
    """Name of the reward manager."""
    reward_kwargs: dict[str, Any] = mapping()
    """Further arguments of the reward manager."""
    launch_reward_fn_async: bool = refused(False, "scoring runs before log-probs are recomputed")


@dataclass
class CustomRewardFunctionConfig:
    path: str | None = None
    """File, `file://` or `pkg://` that holds the score function; null: scored by data source."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: dict[str, Any] = mapping()
    """Further arguments of every call."""
