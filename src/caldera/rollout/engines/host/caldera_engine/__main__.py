"""An engine in a subprocess: takes orders from a socket, and sends sampled tokens.

Usage: python -m caldera_engine SOCKET vllm|sglang, where SOCKET is the number of a file descriptor
whose first message are the engine's arguments.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import Any

import torch

from .base import Event, InferenceEngine
from .frames import Frames, Message


def build_engine(name: str, arguments: dict[str, Any]) -> InferenceEngine:
    """The engine of that name, whose library is imported now."""
    if name == "vllm":
        from .vllm_engine import VllmEngine

        return VllmEngine(arguments)
    from .sglang_engine import SGLangEngine

    return SGLangEngine(arguments)


class Host:
    """Obeys between two steps, so that nothing changes within one."""

    def __init__(self, engine: InferenceEngine, frames: Frames) -> None:
        self._engine = engine
        self._frames = frames
        self._closed = False

    def serve(self) -> None:
        while not self._closed:
            busy = self._engine.has_work()
            while self._frames.is_ready() or self._has_come(wait=not busy):
                self._obey(self._frames.receive())
                busy = True
            if not self._closed and self._engine.has_work():
                self._tell(self._engine.step())

    def _has_come(self, wait: bool) -> bool:
        readable, _, _ = select.select([self._frames], [], [], None if wait else 0)
        return bool(readable)

    def _obey(self, order: Message) -> None:
        what, arguments = order.pop("do"), order
        if what == "add":
            self._add(**arguments)
        elif what == "abort":
            self._engine.abort(**arguments)
        else:
            self._closed = what == "close"
            try:
                answer = getattr(self._engine, what)(**arguments)
            except Exception as error:  # noqa: BLE001 -- the other side raises it
                self._frames.send({"failed": f"{type(error).__name__}: {error}"})
            else:
                self._frames.send({"answer": answer})

    def _add(self, number: int, **request: Any) -> None:
        try:
            self._engine.add(number, **request)
        except Exception as error:  # noqa: BLE001 -- of this request: the others go on
            why = f"{type(error).__name__}: {error}"
            self._tell([Event(number, [], [], 0, "error", error=why)])

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._frames.send({"events": [event.as_message() for event in events]})


def main() -> None:
    descriptor, name = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)  # processes of the engine would keep it open
    frames = Frames(connection)
    arguments = frames.receive()
    try:
        engine = build_engine(name, arguments)
    except Exception as error:
        frames.send({"failed": f"{type(error).__name__}: {error}"})
        raise
    frames.send({"answer": str(torch.__version__)})
    try:
        Host(engine, frames).serve()
    except ConnectionError:  # the parent process is gone
        engine.close()


if __name__ == "__main__":
    main()
