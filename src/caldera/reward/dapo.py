"""The reward managers of DAPO (overlong responses lose reward) and GDPO (several rewards each)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from caldera.errors import ConfigError, RewardError, UnknownKeyError, nearest
from caldera.reward.custom import ScoreFunction
from caldera.reward.explaining import shown
from caldera.reward.manager import REWARD_MANAGERS, NaiveRewardManager
from caldera.reward.samples import Sample, finite, read_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DAPORewardManager", "GDPORewardManager", "OverlongPenalty"]


BUFFER_KEY = "reward_model.reward_kwargs.overlong_buffer_cfg"
BUFFER_SETTINGS = ("enable", "len", "penalty_factor", "log")


@dataclass(frozen=True)
class OverlongPenalty:
    """Up to `max_length - buffer` tokens are free; from there on, the buffer costs `factor`."""

    max_length: int  # tokens
    buffer: int  # tokens
    factor: float
    log: bool
    """Whether the penalty of every sample is recorded."""

    def reward(self, length: int) -> float:
        """The penalty of a response of `length` tokens, at most 0."""
        exceeding = length - (self.max_length - self.buffer)
        return -exceeding / self.buffer * self.factor if exceeding > 0 else 0.0


@REWARD_MANAGERS.register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """The naive manager with a penalty for long responses, which is added to their score.

    `overlong_buffer_cfg` holds `enable`; `len`, the tokens before `max_resp_len` on which the
    penalty grows from nothing to `penalty_factor`; and `log`, which records `overlong_reward` and
    `overlong` (whether there is a penalty) of every sample. What the score function said is
    recorded without the penalty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: ScoreFunction | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **reward_kwargs)
        self.overlong = _read_penalty(overlong_buffer_cfg, max_resp_len)

    def _judge(self, sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
        score, extras = super()._judge(sample, returned)
        if self.overlong is None:
            return score, extras
        overlong_reward = self.overlong.reward(sample.response_length)
        if self.overlong.log:
            extras |= {"overlong_reward": overlong_reward, "overlong": overlong_reward < 0}
        return score + overlong_reward, extras

    def _response_text(self, token_ids: torch.Tensor) -> str:
        text = super()._response_text(token_ids)
        # Decoding drops the token; a model may also have spelt it out.
        return text.removesuffix(str(self.tokenizer.eos_token or ""))


def _read_penalty(settings: Any, max_resp_len: Any) -> OverlongPenalty | None:
    """The penalty that the settings describe, or None if there is none."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{BUFFER_KEY}={settings!r}: takes {', '.join(BUFFER_SETTINGS)}")
    for name in settings:
        if name not in BUFFER_SETTINGS:
            guess = nearest(str(name), BUFFER_SETTINGS)
            hint = f"; did you mean {guess!r}?" if guess else ""
            known = ", ".join(BUFFER_SETTINGS)
            raise UnknownKeyError(f"{BUFFER_KEY}.{name} does not exist{hint} (known: {known})")
    if "enable" not in settings:
        raise ConfigError(f"{BUFFER_KEY}.enable is missing: takes true or false")
    if not _read_switch(settings, "enable"):
        return None
    if not _is_count(max_resp_len):
        raise ConfigError(
            f"reward_model.reward_kwargs.max_resp_len={_shown(max_resp_len)}: takes the most "
            f"tokens of a response, from 1, where {BUFFER_KEY}.enable=true"
        )
    buffer = settings.get("len")
    if not _is_count(buffer) or buffer > max_resp_len:
        raise ConfigError(
            f"{BUFFER_KEY}.len={_shown(buffer)}: takes a number of tokens from 1 to "
            f"max_resp_len={max_resp_len}"
        )
    factor = settings.get("penalty_factor")
    if (
        isinstance(factor, bool)
        or not isinstance(factor, int | float)
        or not 0 <= factor < math.inf
    ):
        raise ConfigError(
            f"{BUFFER_KEY}.penalty_factor={_shown(factor)}: takes a number, 0 or larger"
        )
    return OverlongPenalty(max_resp_len, buffer, float(factor), _read_switch(settings, "log"))


def _read_switch(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{BUFFER_KEY}.{name}={_shown(value)}: takes true or false")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


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
