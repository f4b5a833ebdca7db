"""What HTTP servers have in common: limits, JSON bodies, and a server in a thread."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from http.client import responses
from typing import Any, NoReturn, Self, TypeVar

import h11

from caldera.errors import ConfigError, DataError
from caldera.heap import trim_heap

logger = logging.getLogger(__name__)
T = TypeVar("T")

DEEPEST = 100
"""Lists and objects within each other: what walks through a request must not run out of stack."""


def read_json(body: bytes) -> Any:
    """What a body says. DataError where that is not JSON, or would not come out as it went in:
    numbers that are infinite or none, and halves of characters."""
    try:
        text = body.decode()
        content = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half a character is no text
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise DataError(f"the request is not JSON: {error}") from error
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(content)
    return content


def read_object(body: bytes) -> dict[str, Any]:
    """What a body says, which must be an object."""
    content = read_json(body)
    if not isinstance(content, dict):
        raise DataError(f"the request must be a JSON object, not {type(content).__name__}")
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [
            each
            for outer in level
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> DataError:
    return DataError(f"the request is nested deeper than {DEEPEST} lists and objects")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.40} is out of the range of numbers")
    return number


# ---- How long and how large the requests to any HTTP server may be

MAX_REQUEST_BYTES = 32 * 2**20
MAX_HEADER_BYTES = 2**16
SECONDS_FOR_HEADERS = 30.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
SECONDS_FOR_BODY = 120.0
SECONDS_TO_TAKE_ANSWER = 600.0
SECONDS_BETWEEN_REQUESTS = 600.0
SECONDS_TO_LINGER = 5.0
"""How long a refused request is read on: a client that still sends would not see the answer."""
SECONDS_TO_END = 5.0
LARGE_BYTES = 4 * 2**20
"""Requests and answers from here on give their memory back to the machine."""
BLOCK = 2**16

# ---- Requests and replies


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
    content_type: str = "text/event-stream; charset=utf-8"


Handler = Callable[[Request], Awaitable[Reply | Stream]]
ShowError = Callable[[int, str], dict[str, Any]]


def json_reply(content: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode())


def error_reply(status: int, message: str) -> Reply:
    return json_reply(error_content(status, message), status)


def error_content(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """An error as clients of OpenAI's protocol read it; `field` is what it is about."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def error_detail(status: int, message: str) -> dict[str, Any]:
    """An error as clients of Search-R1's retriever and of Sandbox Fusion read it."""
    return {"detail": message}


# ---- The server


class HttpServer:
    """Listens on a port of `host`, a free one unless named, and serves until it is closed.

    What a client that goes away has asked for is cancelled, and one that is too slow is dropped.
    """

    def __init__(
        self,
        handle: Handler,
        host: str,
        port: int = 0,
        *,
        most_bytes: int | None = None,
        show_error: ShowError = error_content,
    ) -> None:
        """`most_bytes` of a body; None: MAX_REQUEST_BYTES."""
        self._handle = handle
        self._most_bytes = most_bytes
        self._show_error = show_error
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            listening.close()
            where = f"{host}, port {port}" if port else host
            raise ConfigError(f"cannot listen on {where}: {error}") from error
        self.port: int = listening.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=self.address, daemon=True
        )
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connect, sock=listening, backlog=1024))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending requests, for some seconds, and end."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _end(self) -> None:
        self._server.close()
        for task, connection in self._connections.items():
            connection.takes_more = False
            if connection.is_idle:
                task.cancel()
        if self._connections:
            _, busy = await asyncio.wait(self._connections, timeout=SECONDS_TO_END)
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        most = self._most_bytes or MAX_REQUEST_BYTES
        connection = _Connection(self._reply, most, self._show_error, reader, writer)
        task = self._loop.create_task(connection.serve())
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)

    async def _reply(self, request: Request) -> Reply | Stream:
        """The response to a request, whatever happens."""
        try:
            return await self._handle(request)
        except Exception as error:  # the client gets it, and the others go on
            logger.exception("%s %s failed", request.method, request.path)
            told = f"{type(error).__name__}: {error}"
            return json_reply(self._show_error(500, told), 500)


class _Refused(Exception):
    """What the server itself says, instead of its handler."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Connection:
    """A client's connection."""

    def __init__(
        self,
        reply: Handler,
        most_bytes: int,
        show_error: ShowError,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._reply = reply
        self._most_bytes = most_bytes
        self._show_error = show_error
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # what is drained has been taken
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._moved = 0
        self.is_idle = self.takes_more = True

    async def serve(self) -> None:
        """Its requests, one after the other."""
        patience = SECONDS_FOR_HEADERS
        try:
            while self.takes_more and await self._is_asked(patience):
                if not await self._serve_one():
                    self.takes_more = False
                patience = SECONDS_BETWEEN_REQUESTS
                if self._moved > LARGE_BYTES:
                    await asyncio.to_thread(trim_heap)
        except _Refused as error:
            await self._refuse(error.status, str(error))
        except h11.RemoteProtocolError as error:
            await self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError:
            pass  # there is nobody to answer
        except Exception:
            logger.exception("a response broke off")
        finally:
            self._writer.transport.abort()

    async def _is_asked(self, seconds: float) -> bool:
        """Wait for the first bytes of a request. A client that sends none gets no answer."""
        self.is_idle = True
        if not self._protocol.trailing_data[0]:
            async with asyncio.timeout(seconds):
                data = await self._reader.read(BLOCK)
            if not data:
                return False
            self._protocol.receive_data(data)
        self.is_idle = False
        return True

    async def _serve_one(self) -> bool:
        """Answer a request; whether there may be another."""
        request = await self._request()
        self._moved = len(request.body)
        await self._unless_gone(self._answer(request))
        if (self._protocol.our_state, self._protocol.their_state) != (h11.DONE, h11.DONE):
            return False
        self._protocol.start_next_cycle()
        return True

    # ---- reading

    async def _request(self) -> Request:
        head = await self._in_time("headers", SECONDS_FOR_HEADERS, self._event())
        if not isinstance(head, h11.Request):
            raise ConnectionResetError
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
        declared, most = int(headers.get("content-length", 0)), self._most_bytes
        if declared > most:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(declared, most))
        body = await self._in_time("body", SECONDS_FOR_BODY, self._body())
        return Request(head.method.decode("ascii"), head.target.decode("ascii"), body, headers)

    async def _body(self) -> bytes:
        pieces, size = [], 0
        while isinstance(event := await self._event(), h11.Data):
            pieces.append(bytes(event.data))
            size += len(event.data)
            if size > self._most_bytes:
                told = _too_large(None, self._most_bytes)
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, told)
        return b"".join(pieces)

    async def _event(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            if self._protocol.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            data = await self._reader.read(BLOCK)
            if not data and self._protocol.their_state is h11.SEND_BODY:
                raise _Refused(HTTPStatus.BAD_REQUEST, "the body ended before its Content-Length")
            self._protocol.receive_data(data)
        return event

    async def _in_time(self, part: str, seconds: float, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            told = f"the {part} of a request must be there within {seconds:g} s"
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, told) from error

    async def _unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, which is cancelled if the client goes away first."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionResetError
            working.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.wait({working, watching})

    async def _gone(self) -> None:
        """Returns when the client has closed its side; of one that sends its next request already,
        only the beginning is read."""
        if data := await self._reader.read(BLOCK):
            self._protocol.receive_data(data)
            await asyncio.Event().wait()

    # ---- writing

    async def _answer(self, request: Request) -> None:
        reply = await self._reply(request)
        if isinstance(reply, Stream):
            async with aclosing(reply.pieces) as pieces:
                await self._begin(200, reply.content_type, ("Cache-Control", "no-cache"))
                async for piece in pieces:
                    await self._send(h11.Data(data=piece))
        else:
            length = ("Content-Length", str(len(reply.body)))
            await self._begin(reply.status, reply.content_type, length)
            if request.method != "HEAD":
                await self._send(h11.Data(data=reply.body))
        await self._send(h11.EndOfMessage())

    async def _begin(self, status: int, content_type: str, *others: tuple[str, str]) -> None:
        headers = [("Date", formatdate(usegmt=True)), ("Content-Type", content_type), *others]
        reason = responses.get(status, "")
        await self._send(h11.Response(status_code=status, headers=headers, reason=reason))

    async def _send(self, event: Any) -> None:
        data = self._protocol.send(event) or b""
        self._moved += len(data)
        self._writer.write(data)
        async with asyncio.timeout(SECONDS_TO_TAKE_ANSWER):
            await self._writer.drain()

    async def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer, and give the client time to read it: the rest of the request stays unread."""
        body = json.dumps(self._show_error(status, message)).encode()
        length, close = ("Content-Length", str(len(body))), ("Connection", "close")
        with suppress(OSError):
            await self._begin(status, "application/json", length, close)
            await self._send(h11.Data(data=body))
            self._writer.write_eof()
            async with asyncio.timeout(SECONDS_TO_LINGER):
                while await self._reader.read(BLOCK):
                    pass


def _too_large(size: int | None, most: int) -> str:
    return f"a request may have {most} bytes, not {size if size is not None else 'more'}"


def own_address(peer: str) -> str:
    """The address of this machine by which it speaks with `peer`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # of UDP: nothing is sent
        return str(probe.getsockname()[0])
