"""`caldera sandbox serve`: a sandbox for other machines, behind Sandbox Fusion's protocol."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.console import Console

from caldera.errors import CalderaError, ConfigError, DataError
from caldera.reward.sandbox.fusion import answer, sandbox_error
from caldera.reward.sandbox.limits import Limits
from caldera.reward.sandbox.pool import Sandbox

__all__ = ["SandboxServer", "serve"]

MAX_REQUEST_BYTES = 32 * 2**20
SECONDS_TO_SEND_A_REQUEST = 60


class SandboxServer(ThreadingHTTPServer):
    """Answers `POST /run_code` by `sandbox`, and `GET /v1/ping`."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, sandbox: Sandbox, host: str, port: int) -> None:
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from error
        self.sandbox = sandbox

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_TO_SEND_A_REQUEST

    def do_GET(self) -> None:
        if self.path == "/v1/ping":
            self._send(HTTPStatus.OK, "pong")
        else:
            self._send(HTTPStatus.NOT_FOUND, {"detail": "the paths are /run_code and /v1/ping"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True  # its body stays unread
            detail = f"Content-Length must be there, and at most {MAX_REQUEST_BYTES}"
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"detail": detail})
            return
        body = self.rfile.read(int(length))
        if self.path.rstrip("/") != "/run_code":
            self._send(HTTPStatus.NOT_FOUND, {"detail": "the paths are /run_code and /v1/ping"})
            return
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise DataError("the request must be a JSON object")
            self._send(HTTPStatus.OK, answer(request, self.server.sandbox))
        except (DataError, ValueError) as error:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": str(error)})
        except CalderaError as error:
            self._send(HTTPStatus.OK, sandbox_error(str(error)))

    def _send(self, status: HTTPStatus, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request: there are thousands."""


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
