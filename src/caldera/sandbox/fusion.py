"""Sandbox Fusion's protocol: what `POST /run_code` takes and gives.

`POST /check` is ours: it takes `tests` beside `code`, and judges outside the program's process.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import threading
import urllib.parse
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from caldera.errors import ConfigError, DataError, RewardError
from caldera.http_client import JsonClient, NoAnswer, Retries, Unavailable
from caldera.sandbox.limits import Limits, Outcome, Status
from caldera.sandbox.pool import Sandbox
from caldera.sandbox.slot import IsAbandoned

logger = logging.getLogger(__name__)


LANGUAGES = ("python", "python3")
DEFAULT_RUN_SECONDS = 10.0
NO_RESULT: dict[str, Any] = {
    "compile_result": None,
    "run_result": None,
    "executor_pod_name": None,
    "files": {},
}


def request_for(
    program: str, stdin: str, files: Mapping[str, bytes], limits: Limits
) -> dict[str, Any]:
    """The body that asks a server to run a program."""
    return {
        "code": program,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limits.wall_seconds,
        "run_timeout": limits.wall_seconds,
        "memory_limit_MB": limits.memory_mb,
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        "fetch_files": [],
    }


def check_request_for(program: str, tests: str, limits: Limits) -> dict[str, Any]:
    """The body that asks a server whether tests pass on what a program defines."""
    return {
        "code": program,
        "tests": tests,
        "run_timeout": limits.wall_seconds,
        "memory_limit_MB": limits.memory_mb,
    }


def outcome_of(response: Mapping[str, Any]) -> Outcome:
    """The outcome of the program in a server's response. Raises RewardError where it has none."""
    result = response.get("run_result")
    if response.get("status") not in ("Success", "Failed") or not isinstance(result, Mapping):
        raise RewardError(f"the sandbox server failed: {response.get('message')!r}")
    stdout, stderr = result.get("stdout") or "", result.get("stderr") or ""
    seconds = result.get("execution_time") or 0.0
    is_text = isinstance(stdout, str) and isinstance(stderr, str)
    if not is_text or not isinstance(seconds, int | float):
        raise RewardError(f"the sandbox server's result makes no sense: {result!s:.200}")
    exit_code = result.get("return_code")
    status: Status = "failed"
    if result.get("status") == "TimeLimitExceeded":
        status = "timed out"
    elif response["status"] == "Success" and exit_code == 0:
        status = "ok"
    return Outcome(
        status,
        stdout,
        stderr,
        exit_code,
        max(0.0, seconds),
        raised=response.get("raised"),
    )


def answer_run(
    request: Mapping[str, Any], sandbox: Sandbox, is_abandoned: IsAbandoned
) -> dict[str, Any]:
    """Run what a client sent, within the sandbox's limits or its own narrower ones."""
    code, stdin = request.get("code"), request.get("stdin")
    stdin = "" if stdin is None else stdin
    if not isinstance(code, str) or not isinstance(stdin, str):
        raise DataError("code and stdin must be strings")
    if request.get("language") not in LANGUAGES:
        language = request.get("language")
        raise DataError(f"language={language!r:.100} is not one of {', '.join(LANGUAGES)}")
    if request.get("fetch_files"):
        raise DataError("fetch_files is not supported: a program's files go when it ends")
    limits = _limits(request, sandbox.limits)
    return _response(sandbox.run(code, stdin, _files(request), limits, is_abandoned))


def answer_check(
    request: Mapping[str, Any], sandbox: Sandbox, is_abandoned: IsAbandoned
) -> dict[str, Any]:
    """Whether tests that a client sent pass on its program; `raised` has the reason if not."""
    code, tests = request.get("code"), request.get("tests")
    if not isinstance(code, str) or not isinstance(tests, str):
        raise DataError("code and tests must be strings")
    outcome = sandbox.check(code, tests, _limits(request, sandbox.limits), is_abandoned)
    return {**_response(outcome), "raised": outcome.raised}


ANSWERS = {"/run_code": answer_run, "/check": answer_check}
"""By the path that is posted to."""


def _files(request: Mapping[str, Any]) -> dict[str, bytes]:
    files = request.get("files")
    if files is None:
        return {}
    try:
        return {name: base64.b64decode(content) for name, content in files.items() if content}
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError("files must map names to base64") from error


def _limits(request: Mapping[str, Any], largest: Limits) -> Limits:
    seconds = _number(request, "run_timeout") or DEFAULT_RUN_SECONDS
    memory = _number(request, "memory_limit_MB") or math.inf
    if not seconds > 0:
        raise DataError(f"run_timeout={seconds} must be greater than 0")
    seconds = min(seconds, largest.wall_seconds)
    return replace(
        largest,
        wall_seconds=seconds,
        cpu_seconds=min(math.ceil(seconds), largest.cpu_seconds),
        memory_mb=int(min(memory, largest.memory_mb)) if memory >= 1 else largest.memory_mb,
    )


def _number(request: Mapping[str, Any], key: str) -> float:
    """0 where there is none."""
    value = request.get(key)
    try:
        if isinstance(value, bool):
            raise TypeError("true and false are no numbers")
        return 0.0 if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{key}={value!r:.100} must be a number: {error}") from error


def _response(outcome: Outcome) -> dict[str, Any]:
    finished = outcome.status in ("ok", "failed", "out of memory")
    run_status = "Finished" if finished else "Error"
    return {
        **NO_RESULT,
        "status": "Success" if outcome.ok else "Failed",
        "message": "" if outcome.ok else outcome.status,
        "run_result": {
            "status": "TimeLimitExceeded" if outcome.status == "timed out" else run_status,
            "execution_time": outcome.seconds,
            "return_code": outcome.exit_code,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
        },
    }


def sandbox_error(message: str) -> dict[str, Any]:
    """The response where the program could not be run at all."""
    return {**NO_RESULT, "status": "SandboxError", "message": message}


# ---- A client of Sandbox Fusion, or of `caldera sandbox serve`, which speaks the same protocol

# A server that is busy responds late: programs wait there for their turn. Ours gives signs of life
# meanwhile, so that programs may wait there as long as it takes.
SECONDS_IN_QUEUE = 60.0
FIRST_PAUSE_SECONDS = 0.5
RETRIED_STATUSES = (429, 500, 502, 503, 504)
UNKNOWN_PATH_STATUSES = (404, 405)
RUNS_ONLY = (
    "%s only runs programs: asserts run there in the process of the program that they test, so "
    "that a response can forge a pass. `caldera sandbox serve` judges them outside, as this "
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
