"""An engine in a subprocess: takes orders from a connection, and sends sampled tokens.

Usage: python -m caldera_engine CONNECTION vllm|sglang, where CONNECTION is the number of a file
descriptor whose first message are the engine's arguments.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from .base import Event, InferenceEngine

Message = dict[str, Any]


def build_engine(name: str, arguments: dict[str, Any]) -> InferenceEngine:
    """The engine of that name, whose library is imported now."""
    if name == "vllm":
        from .vllm_engine import VllmEngine

        return VllmEngine(arguments)
    from .sglang_engine import SGLangEngine

    return SGLangEngine(arguments)


class Host:
    """Obeys between two steps, so that nothing changes within one."""

    def __init__(self, engine: InferenceEngine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._orders: SimpleQueue[Message | None] = SimpleQueue()

    def serve(self) -> None:
        """Returns when the parent process is gone."""
        # A thread: two sides that both only write would wait for ever.
        Thread(target=self._receive, daemon=True).start()
        while True:
            busy = self._engine.has_work()
            while not busy or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                self._obey(order)
                busy = True
            if self._engine.has_work():
                self._tell(self._engine.step())

    def _receive(self) -> None:
        try:
            while True:
                self._orders.put(self._connection.recv())
        except (EOFError, OSError):
            self._orders.put(None)

    def _obey(self, order: Message) -> None:
        what, arguments = order.pop("do"), order
        if what == "add":
            self._add(**arguments)
        elif what == "abort":
            self._engine.abort(**arguments)
        else:
            try:
                answer = getattr(self._engine, what)(**arguments)
            except Exception as error:  # noqa: BLE001 -- the other side raises it
                self._connection.send({"failed": f"{type(error).__name__}: {error}"})
            else:
                self._connection.send({"answer": answer})

    def _add(self, number: int, **request: Any) -> None:
        try:
            self._engine.add(number, **request)
        except Exception as error:  # noqa: BLE001 -- of this request: the others go on
            why = f"{type(error).__name__}: {error}"
            self._tell([Event(number, [], [], 0, "error", error=why)])

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._connection.send({"events": [vars(event) for event in events]})


def main() -> None:
    descriptor, name = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)  # processes of the engine would keep it open
    connection = Connection(int(descriptor))
    arguments = connection.recv()
    try:
        engine = build_engine(name, arguments)
    except Exception as error:
        connection.send({"failed": f"{type(error).__name__}: {error}"})
        raise
    connection.send({"answer": str(torch.__version__)})
    with suppress(ConnectionError):  # the parent process is gone
        Host(engine, connection).serve()
    engine.close()


if __name__ == "__main__":
    main()
