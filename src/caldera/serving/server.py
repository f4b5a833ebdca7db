"""A language model behind HTTP: the protocol of OpenAI, over any sampler.

    POST   /v1/chat/completions  {"messages": [...], ...} -> choices[i].message, usage
    POST   /v1/completions       {"prompt": ..., ...}     -> choices[i].text, usage
    GET    /v1/models            the one that there is
    GET    /health               200; 503 while requests are turned away, or the sampler has ended
    GET    /metrics              for Prometheus
    GET    /sessions             names of the sessions that are kept
    GET    /sessions/NAME        what was sampled in a session; DELETE forgets it

A request with `x-session-id` in its header, or `session_id` in its body, is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import caldera.tools.formats  # noqa: F401 -- registers them
from caldera.errors import CalderaError, ConfigError, DataError, RolloutError
from caldera.rollout import AsyncSampler, Completion, Piece
from caldera.rollout import Request as Sample
from caldera.seeds import derive_seed
from caldera.serving.answering import Answer, StreamingText
from caldera.serving.chat_model import ChatModel
from caldera.serving.conversations import Chat, ChatPrompts, Sampled, read_chat, template_messages
from caldera.serving.metrics import CONTENT_TYPE, FAILED, ServerMetrics
from caldera.serving.reading import (
    CHAT,
    PATHS,
    BadField,
    Fields,
    read_fields,
    read_request,
    session_of,
    text_prompts,
)
from caldera.serving.recording import Recorder, Trajectory, Turn
from caldera.tools.formats import TOOL_PARSERS
from caldera.web import (
    HttpServer,
    Reply,
    Request,
    Stream,
    error_content,
    error_reply,
    json_reply,
)

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


SECONDS_TO_FINISH = 30.0
SECONDS_TO_REPORT = 5.0
SMALL_BYTES = 2**16
SESSIONS = "/sessions/"
MODELS = "/v1/models"
METHODS = {
    **dict.fromkeys(PATHS, "POST"),
    **dict.fromkeys((MODELS, "/health", "/metrics", "/sessions"), "GET"),
}

T = TypeVar("T")


@dataclass(frozen=True)
class Account:
    """The outcomes of the requests of a server."""

    answered: int
    refused: int
    """Answered with an error: they asked for what cannot be, or came when none were taken."""
    cancelled: int
    """Given up by their clients."""
    cut_off: int
    """Ended by the server, which has told their clients."""
    lost: int
    """Failed with the sampler, or still unanswered when the server ended."""


class SessionServer:
    """Serves a sampler that others may use, too, in a separate thread.

    Stop strings need the rollout's `decode`. The owner of the sampler closes this first.
    """

    def __init__(
        self,
        sampler: AsyncSampler,
        model: ChatModel,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        seed: int | None = 0,
        tool_format: str = "hermes",
        recorder: Recorder | None = None,
        restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        """`seed` is the root of the seeds of requests that bring none, each of which gets another
        one; None: their prompt is the seed. Port 0 is a free one. `restarts` is how often an
        engine of the sampler's was started anew."""
        self.recorder = recorder or Recorder()
        self.metrics = ServerMetrics()
        self._sampler = sampler
        self._model = model
        self._seed = seed
        self._restarts = restarts
        self._parser = TOOL_PARSERS[tool_format](model.tokenizer)
        self._prompts = ChatPrompts(model)
        self._numbers = itertools.count()
        self._away: str | None = None
        self._http = HttpServer(self._handle, host, port)
        self.address = self._http.address

    @property
    def url(self) -> str:
        return f"http://{self.address}/v1"

    @property
    def cannot_append(self) -> str | None:
        """Why every request of a chat is a trajectory of its own; None: it need not be."""
        return self._prompts.cannot_append

    def trajectories(self, session: str) -> list[Trajectory]:
        """The turns of a session."""
        return self.recorder.trajectories(session)

    def turn_away(self, why: str) -> None:
        """Refuse new requests with status 503 from now on."""
        self._away = why

    def accept(self) -> None:
        """Accept requests again."""
        self._away = None

    def close(self, seconds: float = SECONDS_TO_FINISH) -> Account:
        """Take no more requests, finish those in flight or, after some time, send their clients
        that they are cut off; then end."""
        self.turn_away("the server is shutting down")
        self._wait_for_requests(seconds)
        if self.metrics.running.total():
            with suppress(RolloutError):  # a sampler that has ended has raised in its callers
                asyncio.run(self._sampler.abort())
            self._wait_for_requests(SECONDS_TO_REPORT)
        unanswered = self.metrics.running.total()
        self._http.close()
        return self._account(unanswered)

    def _wait_for_requests(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.metrics.running.total() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _account(self, unanswered: float) -> Account:
        metrics = self.metrics
        answered, cut_off = metrics.requests.of(status="200"), metrics.cut_off.total()
        failed = metrics.lost.total()
        refused = metrics.requests.total() - answered - cut_off - failed
        return Account(
            int(answered),
            int(refused),
            int(metrics.cancelled.total()),
            int(cut_off),
            int(failed + unanswered),
        )

    # ---- requests

    async def _handle(self, request: Request) -> Reply | Stream:
        path = unquote(request.path.partition("?")[0])
        method = "GET" if request.method == "HEAD" else request.method
        if path in PATHS and method == "POST":
            return await self._answer(path, request)
        reply = self._show(path) if method == "GET" else None
        if method == "DELETE" and path.startswith(SESSIONS):
            found = self.recorder.drop(path.removeprefix(SESSIONS))
            reply = json_reply({"deleted": True}) if found else _no_session(path)
        return reply or _nowhere(request.method, path)

    def _show(self, path: str) -> Reply | None:
        if path == "/health":
            why = self._away or self._why_dead()
            return json_reply({}) if why is None else error_reply(503, why)
        if path == MODELS:
            return json_reply({"object": "list", "data": [self._model.description()]})
        if path == f"{MODELS}/{self._model.name}":
            return json_reply(self._model.description())
        if path == "/metrics":
            self.metrics.restarts.set(self._restarts())
            self.metrics.sessions.set(len(self.recorder.sessions()))
            self.metrics.forgotten.set(self.recorder.forgotten)
            return Reply(200, self.metrics.text().encode(), CONTENT_TYPE)
        if path == "/sessions":
            return json_reply({"sessions": self.recorder.sessions()})
        return self._show_session(path) if path.startswith(SESSIONS) else None

    def _why_dead(self) -> str | None:
        try:
            self._sampler.check()
        except CalderaError as error:
            return str(error)
        return None

    def _show_session(self, path: str) -> Reply:
        name = path.removeprefix(SESSIONS)
        turns = self.recorder.turns(name)
        if turns is None:
            return _no_session(path)
        made = [asdict(each) for each in self.recorder.trajectories(name)]
        requests = [asdict(turn) for turn in turns]
        return json_reply({"session": name, "requests": requests, "trajectories": made})

    async def _answer(self, path: str, request: Request) -> Reply | Stream:
        """The request runs from here on; `_events` reports when one in a stream has ended."""
        metrics = self.metrics
        metrics.running.add()
        reply: Reply | Stream | None = None
        try:
            reply = await self._reply(path, request)
            if isinstance(reply, Reply):
                metrics.count(path, reply.status)
        except asyncio.CancelledError:
            metrics.cancelled.add()
            raise
        except Exception:
            metrics.count(path, FAILED)
            raise
        finally:
            if not isinstance(reply, Stream):
                metrics.running.add(-1)
        return reply

    async def _reply(self, path: str, request: Request) -> Reply | Stream:
        try:
            job = await self._take_in(path, request)
            if not job.answer.asked.streams:
                return json_reply(await self._whole(job))
            events = self._events(job)
            return Stream(chained(await anext(events), events))
        except CalderaError as error:
            status, content = failure(error)
            return json_reply(content, status)

    async def _take_in(self, path: str, request: Request) -> Job:
        """The job of a request; raises if it is impossible."""
        began = time.monotonic()
        self._check_open()
        fields = await _beside(request, lambda: read_fields(path, request.body))
        self._check_name(fields)
        session = session_of(fields, request.headers)
        self.recorder.check(session)
        chat = read_chat(fields, self._model.template_kwargs) if path == CHAT else None
        number, sampled = next(self._numbers), Sampled()
        if session is not None:
            number, sampled = self.recorder.begin(session)
        if chat is None:
            prompts = await _beside(request, lambda: text_prompts(fields, self._model))
        else:
            prompt, encoded_again = await _beside(request, lambda: self._chat_prompt(chat, sampled))
            prompts = [prompt]
            self.metrics.encoded_again.add(encoded_again)
        seed = self._seed_of(session, number)
        asked = read_request(path, fields, prompts, self._model, seed, session)
        self._check_open()  # again: a large request may have been read for seconds
        self.metrics.read.add(sum(map(len, prompts)))
        answer = Answer(asked, self._model, self._parser)
        return Job(answer, began, session, number, chat, sampled)

    def _seed_of(self, session: str | None, number: int) -> int | None:
        own = None if session is None else self.recorder.seed(session)
        if own is not None:  # whatever the session is called
            return derive_seed(own, "request", number)
        return None if self._seed is None else derive_seed(self._seed, session or "", number)

    def _check_open(self) -> None:
        if self._away is not None:
            raise Unavailable(self._away)

    def _check_name(self, fields: Fields) -> None:
        name, model = fields.get("model"), self._model
        if name not in (None, model.name) and not model.answers_to_any_name:
            raise UnknownModel("model", name, f"takes {model.name!r}")

    def _chat_prompt(self, chat: Chat, sampled: Sampled) -> tuple[list[int], int]:
        if self._model.tokenizer.chat_template is None:
            raise DataError(f"{self._model.name} has no chat template; takes POST {PATHS[1]}")
        return self._prompts.tokens(chat, sampled)

    # ---- responses

    async def _whole(self, job: Job) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        tasks = [asyncio.ensure_future(self._sampler.generate(each)) for each in job.samples]
        try:
            completions = await asyncio.gather(*tasks)
            for index, completion in enumerate(completions):
                self._take_down(job, index, completion)
        finally:
            for task in tasks:
                task.cancel()
        self.metrics.seconds.observe(time.monotonic() - job.began)
        return job.answer.whole(completions)

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The events of a stream; an error that comes up after the first is one, too.

        The caller that asks for the first event counts the request's outcome until then.
        """
        status, has_begun = 0, False
        try:
            async with aclosing(self._chunks(job)) as chunks:
                async for chunk in chunks:
                    has_begun = True
                    yield _event(chunk)
            self.metrics.seconds.observe(time.monotonic() - job.began)
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
                self.metrics.running.add(-1)
                if status:
                    self.metrics.count(job.answer.asked.path, status)
                else:
                    self.metrics.cancelled.add()

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
                    self.metrics.first.observe(time.monotonic() - job.began)
                    is_first = False
                running -= piece.completion is not None
                yield index, piece
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    def _take_down(self, job: Job, index: int, completion: Completion) -> None:
        """Count and record a sample that has ended; raises if it was cut off."""
        self.metrics.written.add(len(completion.token_ids))
        self.metrics.version.set(completion.weight_version)
        if completion.finish_reason == "abort":
            self.metrics.cut_off.add()
            raise Unavailable(self._away or "the request was ended by the server")
        if job.chat is not None:
            message = job.answer.message(index, completion)
            self.metrics.malformed.add(job.answer.malformed_calls.get(index, 0))
            if job.session is not None:
                (said,) = template_messages([message])
                prompt, tokens = job.answer.asked.prompts[0], completion.token_ids
                job.sampled.remember(job.chat, said, prompt, tokens)
        if job.session is not None:
            seconds = time.monotonic() - job.began
            turn = Turn.of(job.number, job.samples[index].prompt_ids, completion, seconds)
            self.recorder.add(job.session, turn)


async def _beside(request: Request, work: Callable[[], T]) -> T:
    """The result of the work. That of a large request is done in a thread, since it may take
    seconds, and streams go on meanwhile."""
    return work() if len(request.body) <= SMALL_BYTES else await asyncio.to_thread(work)


def _nowhere(method: str, path: str) -> Reply:
    if path in METHODS:
        return error_reply(405, f"{method} {path}: takes {METHODS[path]}")
    return error_reply(404, f"{method} {path}: there is no such path; takes {', '.join(METHODS)}")


def _no_session(path: str) -> Reply:
    return error_reply(404, f"{path}: there is no such session")
