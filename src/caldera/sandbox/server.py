"""`caldera sandbox serve`: a sandbox for other machines, behind Sandbox Fusion's protocol."""

from __future__ import annotations

import json
import select
import time
from http import HTTPStatus
from typing import Any

from rich.console import Console

from caldera.errors import CalderaError, DataError
from caldera.sandbox.fusion import ANSWERS, sandbox_error
from caldera.sandbox.limits import Limits
from caldera.sandbox.pool import Sandbox
from caldera.sandbox.slot import Abandoned
from caldera.web import JsonHandler, ThreadedServer, read_object

# Clients take a server that is silent for too long for dead.
SECONDS_BETWEEN_SIGNS = 10.0
PATHS = {"detail": f"the paths are {', '.join(ANSWERS)} and /v1/ping"}


class SandboxServer(ThreadedServer):
    """Answers `POST /run_code` and `POST /check` by `sandbox`, and `GET /v1/ping`.

    Programs get slots in the order of their requests. What belongs to a client that has closed its
    connection is dropped, or killed.
    """

    def __init__(self, sandbox: Sandbox, host: str, port: int) -> None:
        super().__init__(host, port, _Handler)
        self.sandbox = sandbox

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class _Handler(JsonHandler):
    server: SandboxServer
    _last_sign = 0.0
    _is_streaming = False  # whether the response has begun

    def get(self) -> None:
        if self.path == "/v1/ping":
            self.send_json(HTTPStatus.OK, "pong")
        else:
            self.send_json(HTTPStatus.NOT_FOUND, PATHS)

    def post(self, body: bytes) -> None:
        answer = ANSWERS.get(self.path.partition("?")[0].rstrip("/"))
        if answer is None:
            self.send_json(HTTPStatus.NOT_FOUND, PATHS)
            return
        self._last_sign = time.monotonic()
        try:
            content = answer(read_object(body), self.server.sandbox, self._client_has_gone)
        except Abandoned:
            self.close_connection = True
        except DataError as error:
            self.send_json(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": str(error)})
        except CalderaError as error:
            self.send_json(HTTPStatus.OK, sandbox_error(str(error)))
        else:
            self.send_json(HTTPStatus.OK, content)

    def _client_has_gone(self) -> bool:
        """Asked again and again while the program waits or runs; gives signs of life as well."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        if poll.poll(0):
            return True
        try:
            self._give_sign()
        except OSError:
            return True
        return False

    def _give_sign(self) -> None:
        """A blank before the JSON: a client's timeout ends a silence, not a wait in the queue."""
        is_due = time.monotonic() - self._last_sign >= SECONDS_BETWEEN_SIGNS
        if not is_due or self.request_version == "HTTP/1.0":  # which knows no chunks
            return
        if not self._is_streaming:
            self._is_streaming = True
            self.send_headers(HTTPStatus.OK, "Transfer-Encoding", "chunked")
        self._send_chunk(b" ")
        self._last_sign = time.monotonic()

    def send_json(self, status: HTTPStatus, content: Any) -> None:
        if not self._is_streaming:
            super().send_json(status, content)
            return
        self._is_streaming = False
        self._send_chunk(json.dumps(content).encode())
        self._send_chunk(b"")

    def _send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()


def serve(host: str, port: int, slots: int, limits: Limits, allow_unsafe: bool) -> None:
    """Until Ctrl-C."""
    console = Console()
    with (
        Sandbox(limits, slots, allow_unsafe=allow_unsafe) as sandbox,
        SandboxServer(sandbox, host, port) as server,
    ):
        console.print(
            f"{server.url}/run_code: {slots} slots, isolated by {sandbox.isolation}, at most "
            f"{limits.wall_seconds:g} s and {limits.memory_mb} MB each. Ctrl-C ends it.",
            soft_wrap=True,
            highlight=False,
        )
        if sandbox.isolation == "none":
            console.print("[bold red]Programs can read this machine's files.[/]")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")
