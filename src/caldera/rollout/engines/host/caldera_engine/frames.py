"""Messages over a stream socket: four bytes that say how long, and that much JSON."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")
CHUNK = 1 << 16

Message = dict[str, Any]


class Frames:
    """Whole messages, in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError when nobody is there to read.

        Messages that come meanwhile are read: two sides that both only write would wait for ever.
        """
        body = json.dumps(message).encode()
        left = memoryview(LENGTH.pack(len(body)) + body)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | select.POLLOUT)
        while left:
            ((_, ready),) = poll.poll()
            if ready & ~select.POLLOUT:  # or an error, which reading raises
                self._take_in()
            if ready & select.POLLOUT:
                left = left[self._write(left) :]

    def is_ready(self) -> bool:
        """Whether a whole message is buffered, which the socket does not show."""
        size = self._size()
        return size is not None and len(self._received) >= LENGTH.size + size

    def receive(self) -> Message:
        """Waits for a message. Raises ConnectionError once the other side is gone."""
        while not self.is_ready():
            self._take_in()
        end = LENGTH.size + (self._size() or 0)
        body = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        message: Message = json.loads(body)
        return message

    def close(self) -> None:
        self._connection.close()

    def _take_in(self) -> None:
        data = self._connection.recv(CHUNK)
        if not data:
            raise ConnectionError("the other side has closed the socket")
        self._received += data

    def _write(self, data: memoryview) -> int:
        """How much of it was written, without waiting."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _size(self) -> int | None:
        if len(self._received) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._received)
        return int(size)
