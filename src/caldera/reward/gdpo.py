"""GDPO's reward manager: several rewards a sample, kept apart for the estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from caldera.errors import ConfigError, RewardError
from caldera.reward.custom import ScoreFunction
from caldera.reward.explaining import shown
from caldera.reward.manager import REWARD_MANAGERS, NaiveRewardManager
from caldera.reward.samples import Sample, finite, read_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["GDPORewardManager"]


@REWARD_MANAGERS.register("gdpo")
class GDPORewardManager(NaiveRewardManager):
    """The naive manager for score functions that return several rewards.

    Each of `reward_keys` (`algorithm.gdpo_reward_keys`) must be a number in the dict that the
    function returns. Without a `score` there, their weighted sum is the score.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: ScoreFunction | None = None,
        reward_fn_key: str = "data_source",
        reward_keys: Sequence[str] | None = None,
        reward_weights: Sequence[float] | None = None,
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **reward_kwargs)
        if not reward_keys:
            raise ConfigError(
                "reward_model.reward_manager=gdpo needs algorithm.gdpo_reward_keys=[...]: the "
                "names of the rewards that the score function returns"
            )
        weights = reward_weights or [1.0] * len(reward_keys)
        if len(weights) != len(reward_keys):
            raise ConfigError(
                f"algorithm.gdpo_reward_weights holds {len(weights)} numbers for the "
                f"{len(reward_keys)} keys of algorithm.gdpo_reward_keys"
            )
        self._weights = dict(zip(reward_keys, weights, strict=True))

    def _judge(self, sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
        if not isinstance(returned, Mapping):
            raise RewardError(
                f"the score function returned {shown(returned)} where algorithm.gdpo_reward_keys "
                f"needs a dict with {', '.join(self._weights)}"
            )
        rewards = {key: finite(returned.get(key), f"the reward {key!r}") for key in self._weights}
        total = sum(weight * rewards[key] for key, weight in self._weights.items())
        score, extras = read_score({"score": total, **returned})
        return score, extras | rewards
