"""Reward managers for whole batches, long responses (DAPO), several rewards (GDPO), rate limits."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch

from caldera.config.fields import shown as shown_value
from caldera.errors import ConfigError, RewardError, UnknownKeyError, nearest
from caldera.protocol import DataProto
from caldera.reward.explaining import no_exit, shown
from caldera.reward.manager import REWARD_MANAGERS, NaiveRewardManager, RewardResult
from caldera.reward.samples import Outcome, Pending, Sample, failure, finite, read_score
from caldera.reward.scoring import Scoring, ThreadScoring, attempt


@REWARD_MANAGERS.register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) once.

    It returns a list with what the naive manager's function would return of each sample. The time
    limit is that of the one call; whatever it raises, no sample of the batch has a score.
    """

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | RewardResult:
        return super().__call__(data, return_dict)  # a separate batch: it knows whole batches alone

    def keywords(self) -> list[str]:
        named = ["data_sources", "solution_strs", "ground_truths", "extra_infos"]
        return [*named, *self.reward_kwargs]

    def _outcomes(self, data: DataProto, known: Sequence[Outcome | None]) -> list[Outcome]:
        samples = [self._sample(data, row) for row in range(len(data))]
        arguments = {
            "data_sources": [sample.data_source for sample in samples],
            "solution_strs": [sample.response for sample in samples],
            "ground_truths": [sample.ground_truth for sample in samples],
            "extra_infos": [sample.extra_info for sample in samples],
            **self.reward_kwargs,
        }
        whole = self._scoring.submit(arguments, f"a batch of {len(samples)} samples")
        if (error := whole.exception()) is not None:
            return [failure(error)] * len(samples)
        with no_exit():
            listed = attempt(_one_a_sample, whole.result(), len(samples))
        if (error := listed.exception()) is not None:
            return [failure(error)] * len(samples)
        return [
            self.outcome(Pending(sample, attempt(lambda value=value: value)))
            for sample, value in zip(samples, listed.result(), strict=True)
        ]


def _one_a_sample(returned: Any, count: int) -> list[Any]:
    if not isinstance(returned, Sequence | np.ndarray | torch.Tensor) or isinstance(returned, str):
        raise RewardError(
            f"the score function must return a list of {count} scores, and returned a "
            f"{type(returned).__name__}"
        )
    if len(returned) != count:
        raise RewardError(f"the score function returned {len(returned)} scores for {count} samples")
    return list(returned)


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
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
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
            f"reward_model.reward_kwargs.max_resp_len={shown_value(max_resp_len)}: takes the most "
            f"tokens of a response, from 1, where {BUFFER_KEY}.enable=true"
        )
    buffer = settings.get("len")
    if not _is_count(buffer) or buffer > max_resp_len:
        raise ConfigError(
            f"{BUFFER_KEY}.len={shown_value(buffer)}: takes a number of tokens from 1 to "
            f"max_resp_len={max_resp_len}"
        )
    factor = settings.get("penalty_factor")
    if (
        isinstance(factor, bool)
        or not isinstance(factor, int | float)
        or not 0 <= factor < math.inf
    ):
        raise ConfigError(
            f"{BUFFER_KEY}.penalty_factor={shown_value(factor)}: takes a number, 0 or larger"
        )
    return OverlongPenalty(max_resp_len, buffer, float(factor), _read_switch(settings, "log"))


def _read_switch(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{BUFFER_KEY}.{name}={shown_value(value)}: takes true or false")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@REWARD_MANAGERS.register("gdpo")
class GDPORewardManager(NaiveRewardManager):
    """The naive manager for score functions that return several rewards.

    Each of `reward_keys` (`algorithm.gdpo_reward_keys`) must be a number in the dict that the
    function returns. Without a `score` there, their weighted sum is the score.
    """

    def __init__(
        self,
        *args: Any,
        reward_keys: Sequence[str] | None = None,
        reward_weights: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
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


MINUTE = 60.0  # seconds
COUNTS = ("max_concurrent", "estimated_tokens_per_request")
"""Limits that are whole numbers and always there."""


class RateLimiter:
    """Admits so many requests, and so many tokens, in any minute. Threads may share it."""

    def __init__(
        self,
        max_rpm: float | None,
        max_tpm: float | None,
        tokens: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Every request is taken to use `tokens` tokens."""
        by_tokens = math.inf if max_tpm is None else max_tpm // tokens
        self._most = min(math.inf if max_rpm is None else max_rpm, by_tokens)
        self._clock, self._sleep = clock, sleep
        self._admitted: deque[float] = deque()  # when, in the last minute
        self._lock = threading.Lock()

    def admit(self) -> None:
        """Return when the next request may be sent."""
        with self._lock:  # first come, first served
            while self._wait() > 0:
                self._sleep(self._wait())
            if self._most < math.inf:
                self._admitted.append(self._clock())

    def _wait(self) -> float:
        """Seconds until a request may be sent."""
        now = self._clock()
        while self._admitted and now - self._admitted[0] >= MINUTE:
            self._admitted.popleft()
        return self._admitted[0] + MINUTE - now if len(self._admitted) >= self._most else 0.0


@REWARD_MANAGERS.register("rate_limited")
@REWARD_MANAGERS.register("limited")
class LimitedRewardManager(NaiveRewardManager):
    """The naive manager with at most `max_concurrent` calls at once, plain or async.

    In any minute at most `max_rpm` calls begin, and at most `max_tpm` tokens are used, of which
    each call is taken to use `estimated_tokens_per_request`. Managers of one process that have the
    same limits share these rates. A call may take `timeout` seconds, which begin when it does.
    """

    def __init__(
        self,
        *args: Any,
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: float = 2000,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        given = {
            "max_concurrent": max_concurrent,
            "max_rpm": max_rpm,
            "max_tpm": max_tpm,
            "estimated_tokens_per_request": estimated_tokens_per_request,
            "timeout": timeout,
        }
        for name, value in given.items():
            _check_limit(name, value, is_count=name in COUNTS)
        if max_tpm is not None and max_tpm < estimated_tokens_per_request:
            raise ConfigError(
                f"reward_model.reward_kwargs.max_tpm={max_tpm}: a call is taken to use "
                f"estimated_tokens_per_request={estimated_tokens_per_request}, so none could begin"
            )
        self._timeout = timeout
        self._max_concurrent = int(max_concurrent)
        self._limiter = _shared_limiter(max_rpm, max_tpm, estimated_tokens_per_request)

    @functools.cached_property
    def _scoring(self) -> Scoring:
        timeout = self.limits.timeout if self._timeout is None else self._timeout
        return ThreadScoring(self.compute_score, timeout, self._max_concurrent, self._limiter.admit)


def _check_limit(name: str, value: Any, is_count: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_count:
        fits, taken = is_number and value >= 1 and value % 1 == 0, "a whole number from 1"
    else:
        fits, taken = value is None or (is_number and value > 0), "a number above 0, or null"
    if not fits:
        given = shown_value(value)
        raise ConfigError(f"reward_model.reward_kwargs.{name}={given}: takes {taken}")


@functools.cache
def _shared_limiter(max_rpm: float | None, max_tpm: float | None, tokens: float) -> RateLimiter:
    return RateLimiter(max_rpm, max_tpm, tokens)
