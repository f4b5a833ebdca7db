"""An HTTP server in a thread; the one place that imports starlette and uvicorn.

What a client that goes away has asked for is cancelled, and one that is too slow is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from h11 import SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

from caldera import web
from caldera.errors import ConfigError, WorkerError
from caldera.heap import trim_heap
from caldera.installation import install_command

if TYPE_CHECKING:
    from starlette.requests import Request as StarletteRequest
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)


SECONDS_TO_START = 30.0
SECONDS_TO_END = 5.0
CLIENT_IS_GONE = 499
EVENTS = "text/event-stream"

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """As it was sent: quoted, and with the query, if there is one."""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By their names in small letters."""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True)
class Stream:
    """A reply that is sent piece by piece. The generator is closed when the client goes away."""

    pieces: AsyncGenerator[bytes, None]
    content_type: str = EVENTS


Handler = Callable[[Request], Awaitable[Reply | Stream]]


def json_reply(content: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode())


def error_content(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """An error as clients of OpenAI's protocol read it; `field` is what it is about."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def error_reply(status: int, message: str) -> Reply:
    return json_reply(error_content(status, message), status)


class HttpServer:
    """Listens on a port of `host`, a free one unless named, and serves until it is closed."""

    def __init__(self, handle: Handler, host: str, port: int = 0) -> None:
        self._server = _make_server(handle)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            where = f"{host}, port {port}" if port else host
            raise ConfigError(f"cannot listen on {where}: {error}") from error
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name=self.address, daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise WorkerError(f"the server on {self.address} did not start")
            time.sleep(0.01)

    def close(self) -> None:
        """Finish pending requests, for some seconds, and end."""
        self._server.should_exit = True
        self._thread.join(2 * SECONDS_TO_END)
        self._socket.close()


def own_address(peer: str) -> str:
    """The address of this machine by which it speaks with `peer`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # of UDP: nothing is sent
        return str(probe.getsockname()[0])


def _make_server(handle: Handler) -> Any:
    try:
        import uvicorn
        from starlette.requests import Request as StarletteRequest
        from starlette.responses import Response

    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a server needs {error.name}, which is not installed: {install_command('serve')}"
        ) from None

    class Streaming(Response):
        def __init__(self, stream: Stream) -> None:
            super().__init__(media_type=stream.content_type)
            del self.headers["content-length"]  # it is not known yet
            self.headers["cache-control"] = "no-cache"
            self._stream = stream

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def send_all() -> None:
                async with aclosing(self._stream.pieces) as pieces:
                    start = {"type": "http.response.start", "status": self.status_code}
                    await send({**start, "headers": self.raw_headers})
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})

            await _unless_gone(send_all(), receive)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reply = await _reply(handle, StarletteRequest(scope, receive))
        if isinstance(reply, Stream):
            response: Response = Streaming(reply)
        else:
            response = Response(reply.body, reply.status, media_type=reply.content_type)
        await response(scope, receive, send)

    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(SECONDS_TO_END),
    )
    return uvicorn.Server(config)


async def _reply(handle: Handler, request: StarletteRequest) -> Reply | Stream:
    """The response to a request, whatever happens."""
    asked = await _read(request)
    if isinstance(asked, Reply):
        return asked
    try:
        reply = await _unless_gone(_await(handle(asked)), request.receive)
    except Exception as error:  # the client gets it, and the others go on
        logger.exception("%s %s failed", asked.method, asked.path)
        return error_reply(500, f"{type(error).__name__}: {error}")
    return Reply(CLIENT_IS_GONE, b"") if reply is None else reply


async def _read(request: StarletteRequest) -> Request | Reply:
    """The request with its body, or what there is to say if it cannot be had."""
    from starlette.requests import ClientDisconnect

    most = web.MAX_REQUEST_BYTES
    declared = int(request.headers.get("content-length", 0))  # h11 has seen that it is a number
    if declared > most:
        return error_reply(413, web.too_large(declared, most))
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                return error_reply(413, web.too_large(None, most))
    except ClientDisconnect:
        return Reply(CLIENT_IS_GONE, b"")
    query = request.scope["query_string"]
    path = request.scope["raw_path"] + (b"?" + query if query else b"")
    return Request(request.method, path.decode("ascii"), b"".join(chunks), dict(request.headers))


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of the work; None if the client goes away first, and the work is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


# ---- A connection to the HTTP server that ends if its client is too slow
#
# Uvicorn waits for ever for headers, bodies, and clients that do not read their responses. Only
# `http_server.py` imports this file, and only when a server starts: it needs uvicorn.


class Phase(NamedTuple):
    """The client's next step, of which request."""

    part: str
    cycle: Any

    @property
    def seconds(self) -> float:
        if self.part == "headers":
            return web.SECONDS_FOR_HEADERS
        return web.SECONDS_FOR_BODY if self.part == "body" else web.SECONDS_TO_LINGER


class PatientProtocol(H11Protocol):
    """Uvicorn's, with an end to its patience."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._phase: Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._received = 0
        self._trims = False

    # ---- what the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._received += len(data)
        super().data_received(data)
        self._watch()

    def eof_received(self) -> None:
        if self._phase is not None and self._phase.part == "body" and not self._is_refused:
            self._refuse(HTTPStatus.BAD_REQUEST, "the body ended before its Content-Length")
        super().eof_received()

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = web.SECONDS_TO_TAKE_ANSWER
        self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._trim()

    # ---- what uvicorn calls

    def on_response_complete(self) -> None:
        super().on_response_complete()
        moved = self._received + self.transport.get_write_buffer_size()
        self._received = 0
        self._trims = moved > web.LARGE_BYTES
        self._trim()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, f"{msg} {sys.exception() or ''}".strip())

    # ---- patience

    def _watch(self) -> None:
        """Start the time of a phase when it begins; later bytes of it do not start it anew."""
        phase = self._find_phase()
        if phase == self._phase or self._is_refused:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if phase is not None:
            self._timer = self.loop.call_later(phase.seconds, self._give_up, phase)

    def _find_phase(self) -> Phase | None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            return Phase("body", cycle) if cycle.more_body else None
        if self.conn.their_state is SEND_BODY:
            return Phase("rest", cycle)  # of a request that is answered already
        if cycle is None or self.conn.trailing_data[0]:
            return Phase("headers", cycle)
        return None  # between two requests, when uvicorn closes by itself

    def _give_up(self, phase: Phase) -> None:
        if phase.part == "rest" or (phase.part == "headers" and not self.conn.trailing_data[0]):
            self.transport.abort()  # nothing was asked
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, web.too_slow(phase.part))

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Respond in place of the application, and close when the client has had time to read."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if self.transport.is_closing() or (is_open and cycle.response_started):
            self.transport.abort()
            return
        self._is_refused = True
        self._unset_keepalive_if_required()
        body = json.dumps(error_content(status, message)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if is_open:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(web.SECONDS_TO_LINGER, self.transport.abort)

    def _trim(self) -> None:
        """Once a large request is done with, and its response is out."""
        if self._trims and not self.flow.write_paused:
            self._trims = False
            self.loop.call_soon(self.loop.run_in_executor, None, trim_heap)
