"""Managers of verl's newer contract: a class with `async run_single(data of length 1)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from caldera.config import PPOTrainerConfig
from caldera.errors import RewardError
from caldera.protocol import DataProto
from caldera.reward.explaining import shown, writable
from caldera.reward.manager import NaiveRewardManager
from caldera.reward.samples import Sample, finite, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SingleRewardManager", "is_single"]


def is_single(manager_class: Any) -> bool:
    """Whether it is a class of that contract."""
    return isinstance(manager_class, type) and callable(getattr(manager_class, "run_single", None))


class SingleRewardManager(NaiveRewardManager):
    """Calls `run_single`, which returns {"reward_score": ..., "reward_extra_info": {...}}."""

    def __init__(
        self,
        manager: Any,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
    ) -> None:
        key = config.data.reward_fn_key
        super().__init__(tokenizer, num_examine, manager.run_single, key)

    def _arguments(self, data: DataProto, sample: Sample) -> Mapping[str, Any]:
        return {"data": data[sample.row : sample.row + 1]}

    def _judge(self, sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
        if not isinstance(returned, Mapping) or "reward_score" not in returned:
            raise RewardError(
                f"run_single must return a dict with 'reward_score', and returned {shown(returned)}"
            )
        extras = returned.get("reward_extra_info") or {}
        if not isinstance(extras, Mapping):
            raise RewardError(f"'reward_extra_info' must be a dict, and is {shown(extras)}")
        score = finite(returned["reward_score"], "'reward_score'")
        return score, {writable(str(key)): plain(value) for key, value in extras.items()}
