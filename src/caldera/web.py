"""What every HTTP server has in common: limits, bodies, and a server of threads."""

from __future__ import annotations

import io
import json
import logging
import math
import socket
import sys
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NoReturn

from caldera.errors import ConfigError, DataError
from caldera.heap import trim_heap

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
SECONDS_FOR_HEADERS = 30.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
SECONDS_FOR_BODY = 120.0
SECONDS_TO_TAKE_ANSWER = 600.0
SECONDS_TO_LINGER = 5.0
"""How long a refused request is read on: a client that still sends would not see the answer."""
LARGE_BYTES = 4 * 2**20
"""Requests and answers from here on give their memory back to the machine."""


def too_large(size: int | None, most: int) -> str:
    return f"a request may have {most} bytes, not {size if size is not None else 'more'}"


def too_slow(part: str) -> str:
    """What a client hears that did not send its headers, or its body, in time."""
    seconds = SECONDS_FOR_HEADERS if part == "headers" else SECONDS_FOR_BODY
    return f"the {part} of a request must be there within {seconds:g} s"


def error_content(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """An error as clients of OpenAI's protocol read it; `field` is what it is about."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def error_text(error: BaseException) -> str:
    """An error for a client's eyes."""
    return f"{type(error).__name__}: {error}"


logger = logging.getLogger(__name__)

LONGEST_NUMBER = 19
"""Digits of a Content-Length."""


class TooSlow(Exception):
    """A client did not send what it began to send."""


class ThreadedServer(ThreadingHTTPServer):
    """Answers until it is shut down. Port 0 is a free one."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, handler: type[JsonHandler]) -> None:
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from error

    @property
    def address(self) -> str:
        return f"{self.server_address[0]!s}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is nothing to report."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class JsonHandler(BaseHTTPRequestHandler):
    """A connection. Subclasses answer `get` and `post` by `send_json`."""

    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer leaves in one piece
    seconds_between_requests: ClassVar[float] = 60.0

    def get(self) -> None:
        raise NotImplementedError

    def post(self, body: bytes) -> None:
        raise NotImplementedError

    def most_bytes(self) -> int:
        """Of a body."""
        return MAX_REQUEST_BYTES

    def send_json(self, status: HTTPStatus, content: Any) -> None:
        body = json.dumps(content).encode()
        self._moved += len(body)
        self.send_headers(status, "Content-Length", str(len(body)))
        self.wfile.write(body)
        self.wfile.flush()

    def send_headers(self, status: HTTPStatus, length_header: str, value: str) -> None:
        self._has_begun = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header(length_header, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    # ---- requests

    def setup(self) -> None:
        super().setup()
        self._incoming = _Incoming(self.connection)
        self.rfile = self._buffered = io.BufferedReader(self._incoming)
        self._is_first = True

    def handle_one_request(self) -> None:
        self.requestline = self.command = ""
        self.request_version = self.protocol_version
        self._has_begun = False
        self._moved = 0
        self._part = "headers"
        idle = SECONDS_FOR_HEADERS if self._is_first else self.seconds_between_requests
        self._is_first = False
        try:
            self._incoming.allow(idle)
            self._buffered.peek(1)
        except TooSlow:
            self.close_connection = True  # nothing was asked
            return
        try:
            self._incoming.allow(SECONDS_FOR_HEADERS)
            super().handle_one_request()
        except TooSlow:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, too_slow(self._part))
        if self._moved > LARGE_BYTES:
            trim_heap()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self._body()
        if body is None:
            return
        try:
            if self.command == "GET":
                self.get()
            else:
                self.post(body)
        except (ConnectionError, TimeoutError, TooSlow):  # there is nobody to answer
            raise
        except Exception as error:  # the client hears of it, and others are answered
            logger.exception("%s %s failed", self.command, self.path)
            if self._has_begun:
                self.close_connection = True
                return
            detail = {"detail": error_text(error)}
            self.send_json(HTTPStatus.INTERNAL_SERVER_ERROR, detail)

    def _body(self) -> bytes | None:
        """None if the request is refused."""
        given = set(self.headers.get_all("Content-Length", []))
        if "Transfer-Encoding" in self.headers or (not given and self.command == "POST"):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a request needs a Content-Length")
            return None
        length = given.pop() if given else "0"
        is_number = length.isascii() and length.isdigit() and len(length) <= LONGEST_NUMBER
        if given or not is_number:
            told = f"Content-Length={', '.join([length, *given])!r:.60}: takes one whole number"
            self._refuse(HTTPStatus.BAD_REQUEST, told)
            return None
        size, most = int(length), self.most_bytes()
        if size > most:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large(size, most))
            return None
        return self._read(size)

    def _read(self, size: int) -> bytes | None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
            self.wfile.flush()
        self._part = "body"
        self._incoming.allow(SECONDS_FOR_BODY)
        body = self.rfile.read(size)
        if len(body) < size:
            told = f"the body ended after {len(body)} of the {size} bytes of its Content-Length"
            self._refuse(HTTPStatus.BAD_REQUEST, told)
            return None
        self._moved += size
        return body

    def handle_expect_100(self) -> bool:
        return True  # it is answered once the length is known to be right

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses before a request is read."""
        if code == HTTPStatus.NOT_IMPLEMENTED:  # a method
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, f"{message}; takes GET and POST"
        status = HTTPStatus(code)
        self._refuse(status, message or explain or status.phrase)

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Answer, and close the connection: the rest of the request stays unread."""
        self.close_connection = True
        if not self._has_begun:
            self.send_json(status, {"detail": detail})
        self._incoming.allow(SECONDS_TO_LINGER)
        with suppress(OSError, TooSlow):
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(io.DEFAULT_BUFFER_SIZE):
                pass

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request: there are thousands."""


class _Incoming(io.RawIOBase):
    """What a client sends, as long as it may take; `settimeout` begins anew with every byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = 0.0

    def allow(self, seconds: float) -> None:
        """For all that is read from now on."""
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TooSlow
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        except TimeoutError as error:
            raise TooSlow from error
        finally:
            self._connection.settimeout(SECONDS_TO_TAKE_ANSWER)
