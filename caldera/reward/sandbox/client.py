"""A client of Sandbox Fusion, or of `caldera sandbox serve`, which speaks the same protocol."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from caldera.errors import ConfigError, RewardError
from caldera.reward.sandbox.fusion import outcome_of, request_for
from caldera.reward.sandbox.limits import Limits, Outcome

__all__ = ["SandboxFusionClient"]

# A server that is busy answers late: programs wait there for their turn.
SECONDS_IN_QUEUE = 60.0
FIRST_PAUSE_SECONDS = 0.5
RETRIED_STATUSES = (429, 500, 502, 503, 504)


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
        self.limits = limits or Limits()
        self._max_concurrent = max_concurrent
        self._places = threading.BoundedSemaphore(max_concurrent)
        self._attempts = attempts

    def run(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a program on the server. Raises RewardError where the server cannot be used."""
        limits = limits or self.limits
        body = json.dumps(request_for(program, stdin, files or {}, limits)).encode()
        pause = FIRST_PAUSE_SECONDS
        for attempts_left in reversed(range(self._attempts)):
            try:
                with self._places:
                    response = self._post(body, limits.wall_seconds + SECONDS_IN_QUEUE)
                return outcome_of(response)
            except (RewardError, OSError, http.client.HTTPException, ValueError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and (
                    error.code not in RETRIED_STATUSES
                )
                if refused or not attempts_left:
                    raise RewardError(f"no answer from {self.url}: {_explain(error)}") from error
                time.sleep(pause)
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def run_many(
        self, programs: Iterable[tuple[str, str]], limits: Limits | None = None
    ) -> list[Outcome]:
        """`run` for each (program, standard input), several at a time; in order."""
        with ThreadPoolExecutor(self._max_concurrent) as threads:
            return list(threads.map(lambda job: self.run(job[0], job[1], limits=limits), programs))

    def _post(self, body: bytes, seconds: float) -> Mapping[str, Any]:
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=seconds) as response:
            answer = json.load(response)
        if not isinstance(answer, Mapping):
            raise RewardError("the answer is not a JSON object")
        return answer


def _explain(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            return f"{error}: {error.read(2000).decode(errors='replace')}"
    return str(error) or type(error).__name__
