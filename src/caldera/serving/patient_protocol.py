"""Uvicorn's protocol with time limits. Imports uvicorn: only a server that starts imports this."""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any, NamedTuple

from h11 import SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

from caldera import web
from caldera.heap import trim_heap


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
        body = json.dumps(web.error_content(status, message)).encode()
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
