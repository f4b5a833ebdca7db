"""Requests that are being answered: sampled, counted, recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from caldera.errors import CalderaError, ConfigError, DataError
from caldera.rollout import AsyncSampler, Completion, Piece
from caldera.rollout import Request as Sample
from caldera.serving.answering import Answer, StreamingText
from caldera.serving.chat_model import ChatModel
from caldera.serving.conversations import Chat, Sampled, template_messages
from caldera.serving.http_server import error_content
from caldera.serving.metrics import FAILED, ServerMetrics
from caldera.serving.reading import BadField
from caldera.serving.recording import Recorder, Turn

logger = logging.getLogger(__name__)


class Unavailable(CalderaError):
    """Requests are turned away."""


class UnknownModel(BadField):
    """A request names a model that is not served."""


@dataclass(frozen=True)
class Job:
    """A request that is being answered."""

    answer: Answer
    began: float
    session: str | None
    number: int
    chat: Chat | None
    sampled: Sampled

    @property
    def samples(self) -> list[Sample]:
        return self.answer.asked.samples


class Jobs:
    """Serves requests, whole or in streams."""

    def __init__(
        self,
        sampler: AsyncSampler,
        model: ChatModel,
        recorder: Recorder,
        metrics: ServerMetrics,
        why_away: Callable[[], str | None],
    ) -> None:
        """`why_away`: the reason why requests are cut off, if it is known."""
        self._sampler = sampler
        self._model = model
        self._recorder = recorder
        self._metrics = metrics
        self._why_away = why_away

    async def whole(self, job: Job) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        tasks = [asyncio.ensure_future(self._sampler.generate(each)) for each in job.samples]
        try:
            completions = await asyncio.gather(*tasks)
            for index, completion in enumerate(completions):
                self._take_down(job, index, completion)
        finally:
            for task in tasks:
                task.cancel()
        self._metrics.seconds.observe(time.monotonic() - job.began)
        return job.answer.whole(completions)

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The events of a stream; an error that comes up after the first is one, too.

        Whoever asks for the first counts what becomes of the request until that is there.
        """
        status, has_begun = 0, False
        try:
            async with aclosing(self._chunks(job)) as chunks:
                async for chunk in chunks:
                    has_begun = True
                    yield _event(chunk)
            self._metrics.seconds.observe(time.monotonic() - job.began)
            status = 200
            yield b"data: [DONE]\n\n"
        except CalderaError as error:
            if not has_begun:
                raise
            status, content = failure(error)
            yield _event(content)
        except Exception as error:
            if not has_begun:
                raise
            logger.exception("POST %s failed in the midst of its stream", job.answer.asked.path)
            status = FAILED
            yield _event(error_content(status, f"{type(error).__name__}: {error}"))
        finally:
            if has_begun:
                self._metrics.running.add(-1)
                if status:
                    self._metrics.count(job.answer.asked.path, status)
                else:
                    self._metrics.cancelled.add()

    async def _chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        answer, asked = job.answer, job.answer.asked
        first = answer.first_chunk()
        texts = [StreamingText(self._model, sample.params) for sample in job.samples]
        completions: list[Completion] = []
        async with aclosing(self._pieces(job)) as pieces:
            async for index, piece in pieces:
                if first is not None:
                    yield first
                    first = None
                if piece.completion is None:
                    if chunk := self._piece(answer, index, piece, texts[index]):
                        yield chunk
                    continue
                completions.append(piece.completion)
                self._take_down(job, index, piece.completion)
                if asked.comes_whole:
                    yield answer.whole_piece(index, piece.completion)
                elif rest := texts[index].rest(answer.text(index, piece.completion)):
                    yield answer.piece(index, rest, Completion([], [], "stop", 0))
                yield answer.last_piece(index, piece.completion)
        if asked.tells_usage:
            yield answer.chunk([], answer.usage(completions))

    def _piece(
        self, answer: Answer, index: int, piece: Piece, text: StreamingText
    ) -> dict[str, Any] | None:
        """The chunk of some tokens; None if there is nothing to send of them yet."""
        asked = answer.asked
        if asked.comes_whole:
            return None
        new = text.add(piece.token_ids)
        if not (new or asked.log_probs or asked.tells_tokens):
            return None
        tokens = Completion(piece.token_ids, piece.log_probs, "length", 0)
        return answer.piece(index, new, tokens)

    async def _pieces(self, job: Job) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all samples as they come, with the place of each among the samples."""
        arrived: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

        async def listen(index: int, sample: Sample) -> None:
            try:
                async with aclosing(self._sampler.stream(sample)) as pieces:
                    async for piece in pieces:
                        arrived.put_nowait((index, piece))
            except Exception as error:  # noqa: BLE001 -- the waiting reader of pieces raises it
                arrived.put_nowait((index, error))

        listeners = [asyncio.create_task(listen(*each)) for each in enumerate(job.samples)]
        is_first, running = True, len(listeners)
        try:
            while running:
                index, piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                if is_first:
                    self._metrics.first.observe(time.monotonic() - job.began)
                    is_first = False
                running -= piece.completion is not None
                yield index, piece
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    def _take_down(self, job: Job, index: int, completion: Completion) -> None:
        """Count and record a sample that has ended; raises if it was cut off."""
        self._metrics.written.add(len(completion.token_ids))
        self._metrics.version.set(completion.weight_version)
        if completion.finish_reason == "abort":
            self._metrics.cut_off.add()
            raise Unavailable(self._why_away() or "the request was ended by the server")
        if job.chat is not None:
            message = job.answer.message(index, completion)
            self._metrics.malformed.add(job.answer.malformed_calls.get(index, 0))
            if job.session is not None:
                (said,) = template_messages([message])
                prompt, tokens = job.answer.asked.prompts[0], completion.token_ids
                job.sampled.remember(job.chat, said, prompt, tokens)
        if job.session is not None:
            seconds = time.monotonic() - job.began
            turn = Turn.of(job.number, job.samples[index].prompt_ids, completion, seconds)
            self._recorder.add(job.session, turn)


def failure(error: CalderaError) -> tuple[int, dict[str, Any]]:
    """(The status, the content) of an error."""
    if isinstance(error, UnknownModel):
        status = 404
    elif isinstance(error, DataError | ConfigError):
        status = 400
    else:
        status = 503 if isinstance(error, Unavailable) else FAILED
    field = error.name if isinstance(error, BadField) else None
    return status, error_content(status, str(error), field)


async def chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
