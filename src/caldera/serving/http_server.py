"""An HTTP server in a thread, by starlette and uvicorn, which are imported when one starts.

What a client that goes away has asked for is cancelled, and one that is too slow is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from caldera import web
from caldera.errors import ConfigError, WorkerError
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


def error_reply(status: int, message: str) -> Reply:
    return json_reply(web.error_content(status, message), status)


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

        from caldera.serving.patient_protocol import PatientProtocol
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
