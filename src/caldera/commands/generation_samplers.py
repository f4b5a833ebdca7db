"""Answers from samplers of the run's own: one for each device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from caldera.commands.generation import Questions
from caldera.config import ModelConfig
from caldera.config.offline import GenerationConfig, generation_sampler
from caldera.config.samplers import check_untrained
from caldera.data import hf_tokenizer, object_array
from caldera.data.chat import require_chat_template, tokenize_chat
from caldera.errors import DataError, RolloutError
from caldera.models.loading import import_external
from caldera.protocol import DataProto, DataProtoConfig
from caldera.rollout.remote import SEED_RANGE, ServerClient
from caldera.seeds import derive_seed
from caldera.single_controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from caldera.workers import GenerationWorker
from caldera.workers.generation import (
    MODEL_KEY,
    PROMPT_IDS,
    RESPONSE_IDS,
    SEEDS,
    untrained_sampler,
)

ROLE = "sampler"
MakeGroups = Callable[[ResourcePool, dict[str, ClassWithInitArgs]], dict[str, WorkerGroup]]
"""(places, how to make the worker of each role) -> a group of each role."""


class Samplers:
    """Samples in a worker group, which lives while this is entered."""

    def __init__(
        self,
        config: GenerationConfig,
        questions: Questions,
        rows: Iterable[int],
        make_groups: MakeGroups,
    ) -> None:
        """All rows are tokenised first, so that a prompt that is too long is reported at once."""
        disable_progress_bar()  # of transformers, in loading: it would tear our own
        self._config = config
        self._model = ModelConfig(
            path=config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            external_lib=config.model.external_lib,
        )
        import_external(self._model, MODEL_KEY)
        check_untrained(config.rollout, untrained_sampler(config.rollout.sampler).traits)
        self._tokenizer = hf_tokenizer(
            str(config.model.path), config.model.trust_remote_code, key="model.path"
        )
        self._tokens = _tokenize(self._tokenizer, config, questions, rows)
        self._make_groups = make_groups

    def __enter__(self) -> Samplers:
        trainer = self._config.trainer
        eos, device = self._tokenizer.eos_token_id, str(trainer.device)
        recipe = ClassWithInitArgs(
            GenerationWorker, self._model, generation_sampler(self._config), eos, device
        )
        places = ResourcePool([trainer.n_gpus_per_node or 1] * trainer.nnodes)
        self._group = self._make_groups(places, {ROLE: recipe})[ROLE]
        try:
            self._group.init_model()
        except BaseException:
            self._group.shutdown()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._group.shutdown()

    def answers(self, rows: range) -> list[list[str]]:
        """The texts of all samples of each row."""
        root, samples = self._config.rollout.seed, range(self._config.data.n_samples)
        columns = {
            PROMPT_IDS: object_array([self._tokens[row] for row in rows]),
            SEEDS: object_array([[derive_seed(root, row, k) for k in samples] for row in rows]),
        }
        # A batch need not divide by the number of ranks.
        meta = {DataProtoConfig.auto_padding_key: True}
        sampled = self._group.generate_sequences(DataProto(None, columns, meta))
        return [
            [str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
            for answers in sampled.non_tensor_batch[RESPONSE_IDS]
        ]


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    config: GenerationConfig,
    questions: Questions,
    rows: Iterable[int],
) -> dict[int, list[int]]:
    require_chat_template(tokenizer, {}, "model.path to a folder whose tokenizer has one")
    most = config.rollout.prompt_length
    tokens = {row: tokenize_chat(tokenizer, questions.prompts[row], {}) for row in rows}
    long = [row for row, ids in tokens.items() if len(ids) > most]
    if long:
        raise DataError(
            f"{questions.where(long[0])}: the prompt has {len(tokens[long[0]])} tokens, more than "
            f"rollout.prompt_length={most} ({len(long)} such prompts in all): set "
            f"rollout.prompt_length={max(len(tokens[row]) for row in long)}, or leave them out"
        )
    return tokens


# ---- Answers from an OpenAI-compatible server: POST /v1/chat/completions, many requests at a time

FAILURE = (
    "no response to row {row} in {{attempts}} attempts: {{error}}. "
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
            "seed": derive_seed(rollout.seed, row) % SEED_RANGE,
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
                f"{self._client.told}: the response to row {row} has no choices with a message: "
                f"{answered!r:.500}"
            ) from error
        if len(texts) != wanted:
            raise RolloutError(
                f"{self._client.told} gave {len(texts)} responses to row {row}, "
                f"data.n_samples={wanted} were asked for (n)"
            )
        return texts
