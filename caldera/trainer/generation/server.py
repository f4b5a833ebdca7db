"""Answers from an OpenAI-compatible server: POST /v1/chat/completions, many requests at a time."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import httpx2

from caldera.config.offline import GenerationConfig
from caldera.errors import RolloutError
from caldera.models.seeds import derive_seed
from caldera.storage import shown_url
from caldera.trainer.generation.questions import Questions

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_ANSWER = 3600.0
BUSY_STATUSES = (408, 425, 429)
"""Those below 500 that are worth another attempt."""
SEEDS = 2**31
"""A seed fits an integer of 32 bits, in case a server keeps it in one."""


class _Unavailable(Exception):
    """Another attempt may succeed."""


class ServerAnswers:
    """Asks a server. Connections stay open while this is entered.

    `rollout.max_num_seqs` bounds the answers that are asked for at the same time.
    """

    def __init__(self, config: GenerationConfig, questions: Questions) -> None:
        self._config = config
        self._prompts = questions.prompts
        given = str(config.rollout.url)
        self._url = given.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._told = f"rollout.url={shown_url(given)!r}"
        self._in_flight = max(1, config.rollout.max_num_seqs // config.data.n_samples)

    def __enter__(self) -> ServerAnswers:
        self._runner = asyncio.Runner()
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(SECONDS_TO_ANSWER, connect=SECONDS_TO_CONNECT),
            limits=httpx2.Limits(max_connections=self._in_flight),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def answers(self, rows: range) -> list[list[str]]:
        """The texts of all samples of each row."""
        return self._runner.run(self._all(rows))

    async def _all(self, rows: range) -> list[list[str]]:
        gate = asyncio.Semaphore(self._in_flight)

        async def ask(row: int) -> list[str]:
            async with gate:
                return await self._ask(row)

        try:
            async with asyncio.TaskGroup() as group:  # whose first failure ends the others
                tasks = [group.create_task(ask(row)) for row in rows]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _ask(self, row: int) -> list[str]:
        pause = FIRST_PAUSE_SECONDS
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return self._read(await self._post(self._request(row)), row)
            except _Unavailable as error:
                if not attempts_left:
                    raise RolloutError(
                        f"{self._told}: no answers to row {row} in {ATTEMPTS} attempts: {error}. "
                        "What is finished is kept: the same command goes on with it"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _request(self, row: int) -> dict[str, Any]:
        rollout = self._config.rollout
        return {
            "model": self._config.model.path,
            "messages": self._prompts[row],
            "n": self._config.data.n_samples,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_tokens": rollout.response_length,
            "seed": derive_seed(rollout.seed, row) % SEEDS,
        }

    async def _post(self, request: dict[str, Any]) -> Any:
        try:
            response = await self._client.post(self._url, json=request)
        except httpx2.TransportError as error:
            raise _Unavailable(str(error) or type(error).__name__) from error
        status = response.status_code
        told = f"status {status}: {response.text[:500]}"
        if status >= 500 or status in BUSY_STATUSES:
            raise _Unavailable(told)
        if not response.is_success:
            raise RolloutError(f"{self._told} refuses the request, {told}")
        try:
            return response.json()
        except ValueError as error:
            raise _Unavailable(f"no JSON: {response.text[:500]}") from error

    def _read(self, answered: Any, row: int) -> list[str]:
        wanted = self._config.data.n_samples
        try:
            choices = sorted(answered["choices"], key=lambda choice: choice.get("index", 0))
            texts = [choice["message"]["content"] or "" for choice in choices]
            # Half of a surrogate pair is valid JSON, and no text that a file could hold.
            texts = [text.encode("utf-8", "replace").decode() for text in texts]
        except (AttributeError, LookupError, TypeError) as error:
            raise RolloutError(
                f"{self._told}: the answer to row {row} has no choices with a message: "
                f"{answered!r:.500}"
            ) from error
        if len(texts) != wanted:
            raise RolloutError(
                f"{self._told} gave {len(texts)} answers to row {row}, data.n_samples={wanted} "
                "were asked for (n)"
            )
        return texts
