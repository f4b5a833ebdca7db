"""Answers from an OpenAI-compatible server: POST /v1/chat/completions, many requests at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from caldera.config.offline import GenerationConfig
from caldera.errors import RolloutError
from caldera.rollout.server_client import SEEDS, ServerClient
from caldera.seeds import derive_seed
from caldera.trainer.generation.questions import Questions

FAILURE = (
    "no answers to row {row} in {{attempts}} attempts: {{error}}. "
    "What is finished is kept: the same command goes on with it"
)


class ServerAnswers:
    """Asks a server. Connections stay open while this is entered.

    `rollout.max_num_seqs` bounds the answers that are asked for at the same time.
    """

    def __init__(self, config: GenerationConfig, questions: Questions) -> None:
        self._config = config
        self._prompts = questions.prompts
        self._in_flight = max(1, config.rollout.max_num_seqs // config.data.n_samples)

    def __enter__(self) -> ServerAnswers:
        self._runner = asyncio.Runner()
        self._client = ServerClient(str(self._config.rollout.url), "rollout.url", self._in_flight)
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._client.close())
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
        failure = FAILURE.format(row=row)
        return self._read(
            await self._client.ask("chat/completions", self._request(row), failure), row
        )

    def _request(self, row: int) -> dict[str, Any]:
        rollout = self._config.rollout
        asked = {
            "presence_penalty": rollout.presence_penalty,
            "frequency_penalty": rollout.frequency_penalty,
            "stop": rollout.stop,
        }
        return {
            **{name: value for name, value in asked.items() if value},  # others are the server's
            "model": self._config.model.path,
            "messages": self._prompts[row],
            "n": self._config.data.n_samples,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_tokens": rollout.response_length,
            "seed": derive_seed(rollout.seed, row) % SEEDS,
        }

    def _read(self, answered: Any, row: int) -> list[str]:
        wanted = self._config.data.n_samples
        try:
            choices = sorted(answered["choices"], key=lambda choice: choice.get("index", 0))
            texts = [choice["message"]["content"] or "" for choice in choices]
            # Half of a surrogate pair is valid JSON, and no text that a file could hold.
            texts = [text.encode("utf-8", "replace").decode() for text in texts]
        except (AttributeError, LookupError, TypeError) as error:
            raise RolloutError(
                f"{self._client.told}: the answer to row {row} has no choices with a message: "
                f"{answered!r:.500}"
            ) from error
        if len(texts) != wanted:
            raise RolloutError(
                f"{self._client.told} gave {len(texts)} answers to row {row}, "
                f"data.n_samples={wanted} were asked for (n)"
            )
        return texts
