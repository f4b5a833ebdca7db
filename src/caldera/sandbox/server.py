"""`caldera sandbox serve`: a sandbox for other machines, behind Sandbox Fusion's protocol."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

from rich.console import Console

from caldera.errors import CalderaError, DataError
from caldera.sandbox.fusion import ANSWERS, sandbox_error
from caldera.sandbox.limits import Limits
from caldera.sandbox.pool import Sandbox
from caldera.sandbox.slot import IsAbandoned
from caldera.threads import in_thread
from caldera.web import HttpServer, Reply, Request, Stream, error_detail, json_reply, read_object

# Clients take a server that is silent for too long for dead.
SECONDS_BETWEEN_SIGNS = 10.0


class SandboxServer(HttpServer):
    """Answers `POST /run_code` and `POST /check` by `sandbox`, and `GET /v1/ping`.

    Programs get slots in the order of their requests. What belongs to a client that has closed its
    connection is dropped, or killed.
    """

    def __init__(self, sandbox: Sandbox, host: str, port: int) -> None:
        self.sandbox = sandbox
        super().__init__(self._answer, host, port, show_error=error_detail)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def _answer(self, request: Request) -> Reply | Stream:
        path = request.path.partition("?")[0].rstrip("/")
        if (request.method, path) == ("GET", "/v1/ping"):
            return json_reply("pong")
        if request.method != "POST" or path not in ANSWERS:
            told = f"the paths are {', '.join(ANSWERS)} and /v1/ping"
            return json_reply(error_detail(404, told), 404)
        gone = threading.Event()
        work = in_thread(self._judge, path, request.body, gone.is_set)
        replying = asyncio.ensure_future(work)
        try:
            await asyncio.wait({replying}, timeout=SECONDS_BETWEEN_SIGNS)
        except asyncio.CancelledError:
            gone.set()
            raise
        if replying.done():
            return replying.result()
        return Stream(_with_signs(replying, gone), "application/json")

    def _judge(self, path: str, body: bytes, is_abandoned: IsAbandoned) -> Reply:
        try:
            return json_reply(ANSWERS[path](read_object(body), self.sandbox, is_abandoned))
        except DataError as error:
            return json_reply(error_detail(422, str(error)), 422)
        except CalderaError as error:
            return json_reply(sandbox_error(str(error)))


async def _with_signs(
    replying: asyncio.Future[Reply], gone: threading.Event
) -> AsyncGenerator[bytes, None]:
    """Blanks before the JSON: a client's timeout ends a silence, not a wait in the queue."""
    try:
        while not replying.done():
            yield b" "
            await asyncio.wait({replying}, timeout=SECONDS_BETWEEN_SIGNS)
        yield replying.result().body
    finally:
        gone.set()


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
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("ended")
