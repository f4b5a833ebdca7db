"""A client of Sandbox Fusion, or of `caldera sandbox serve`, which speaks the same protocol."""

from __future__ import annotations

import json
import logging
import threading
import urllib.parse
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from caldera.errors import ConfigError, RewardError
from caldera.http_client import JsonClient, NoAnswer, Retries, Unavailable
from caldera.reward.sandbox.fusion import check_request_for, outcome_of, request_for
from caldera.reward.sandbox.limits import Limits, Outcome

__all__ = ["SandboxFusionClient"]

logger = logging.getLogger(__name__)

# A server that is busy answers late: programs wait there for their turn. Ours gives signs of life
# meanwhile, so that programs may wait there as long as it takes.
SECONDS_IN_QUEUE = 60.0
FIRST_PAUSE_SECONDS = 0.5
RETRIED_STATUSES = (429, 500, 502, 503, 504)
UNKNOWN_PATH_STATUSES = (404, 405)
RUNS_ONLY = (
    "%s only runs programs: asserts run there in the process of the program that they test, so "
    "that an answer can forge a pass. `caldera sandbox serve` judges them outside, as this "
    "machine's own sandbox does (reward_model.sandbox_fusion.url=null)"
)


class _UnknownPath(RewardError):
    """The server has no such call."""


class SandboxFusionClient:
    """`run` and `run_many` as of a `Sandbox`, on a server. Threads may share it.

    `url` is the server's, with or without its path /run_code.
    """

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        *,
        max_concurrent: int = 64,
        attempts: int = 4,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"url={url!r} is not the address of an HTTP server")
        if max_concurrent < 1 or attempts < 1:
            raise ConfigError(f"{max_concurrent=} and {attempts=} must be at least 1")
        path = parts.path.rstrip("/") or "/run_code"
        self.url = urllib.parse.urlunsplit(parts._replace(path=path))
        check_path = f"{path.rpartition('/')[0]}/check"
        self._check_url = urllib.parse.urlunsplit(parts._replace(path=check_path))
        self._offers_check: bool | None = None  # None: it has not been asked yet
        self._asking = threading.Lock()
        self.limits = limits or Limits()
        self._max_concurrent = max_concurrent
        self._places = threading.BoundedSemaphore(max_concurrent)
        self._attempts = attempts
        self._client = JsonClient(RETRIED_STATUSES)

    def run(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a program on the server. Raises RewardError where the server cannot be used."""
        limits = limits or self.limits
        return self._ask(self.url, request_for(program, stdin, files or {}, limits), limits)

    def check(self, program: str, tests: str, limits: Limits | None = None) -> Outcome | None:
        """`check` as of a `Sandbox`; None where the server only runs programs, which is logged.

        A server that has judged once is never taken for one that only runs programs.
        """
        if self._offers_check is False:
            return None
        limits = limits or self.limits
        try:
            outcome = self._ask(self._check_url, check_request_for(program, tests, limits), limits)
        except _UnknownPath:
            with self._asking:
                if self._offers_check:
                    raise
                if self._offers_check is None:
                    logger.warning(RUNS_ONLY, self.url)
                self._offers_check = False
            return None
        self._offers_check = True
        return outcome

    def _ask(self, url: str, request: Mapping[str, Any], limits: Limits) -> Outcome:
        body = json.dumps(request).encode()

        def attempt() -> Outcome:
            with self._places:
                answer = self._client.post(url, body, limits.wall_seconds + SECONDS_IN_QUEUE)
            if not isinstance(answer, Mapping):
                raise RewardError("the answer is not a JSON object")
            return outcome_of(answer)

        retries = Retries(self._attempts, FIRST_PAUSE_SECONDS)
        try:
            return retries.run(attempt, (Unavailable, RewardError))
        except (NoAnswer, RewardError) as error:
            is_unknown = isinstance(error, NoAnswer) and error.status in UNKNOWN_PATH_STATUSES
            kind = _UnknownPath if is_unknown else RewardError
            raise kind(f"no answer from {url}: {error}") from error

    def run_many(
        self, programs: Iterable[tuple[str, str]], limits: Limits | None = None
    ) -> list[Outcome]:
        """`run` for each (program, standard input), several at a time; in order."""
        with ThreadPoolExecutor(self._max_concurrent) as threads:
            return list(threads.map(lambda job: self.run(job[0], job[1], limits=limits), programs))
