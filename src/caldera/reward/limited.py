"""The reward manager of score functions that call a service with a limited rate."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from caldera.errors import ConfigError
from caldera.reward.custom import ScoreFunction
from caldera.reward.manager import REWARD_MANAGERS, NaiveRewardManager
from caldera.reward.scoring import Scoring, ThreadScoring

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LimitedRewardManager", "RateLimiter"]

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
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: ScoreFunction | None = None,
        reward_fn_key: str = "data_source",
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: float = 2000,
        timeout: float | None = None,
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **reward_kwargs)
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
        shown = "null" if value is None else repr(value)
        raise ConfigError(f"reward_model.reward_kwargs.{name}={shown}: takes {taken}")


@functools.cache
def _shared_limiter(max_rpm: float | None, max_tpm: float | None, tokens: float) -> RateLimiter:
    return RateLimiter(max_rpm, max_tpm, tokens)
