"""An HTTP server in a thread; the one place that imports starlette and uvicorn."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caldera.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from starlette.requests import Request as StarletteRequest
    from starlette.responses import Response

MAX_REQUEST_BYTES = 32 * 2**20
SECONDS_TO_START = 30.0
SECONDS_TO_END = 5.0
METHODS = ["GET", "POST"]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With the query, if there is one."""
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"


Handler = Callable[[Request], Awaitable[Reply]]


def json_reply(content: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode())


def error_reply(status: int, message: str) -> Reply:
    """An error as clients of OpenAI's protocol read it."""
    return json_reply({"error": {"message": message, "code": status}}, status)


class HttpServer:
    """Listens on a free port of `host`, and answers by `handle`, until it is closed."""

    def __init__(self, handle: Handler, host: str) -> None:
        self._server = _make_server(handle)
        self._socket = socket.socket()
        try:
            self._socket.bind((host, 0))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {host}: {error}") from error
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
        """Answer what has been asked, for some seconds, and end."""
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
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a server of reward models needs {error.name}, which is not installed; "
            "install caldera[serve]"
        ) from None

    async def answer(request: StarletteRequest) -> Response:
        reply = await _reply(handle, request)
        return Response(reply.body, reply.status, media_type=reply.content_type)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=METHODS)])
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=int(SECONDS_TO_END),
    )  # fmt: skip
    return uvicorn.Server(config)


async def _reply(handle: Handler, request: StarletteRequest) -> Reply:
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_REQUEST_BYTES:
            return error_reply(413, f"a request may have {MAX_REQUEST_BYTES} bytes")
    query = f"?{request.url.query}" if request.url.query else ""
    return await handle(Request(request.method, request.url.path + query, b"".join(chunks)))
