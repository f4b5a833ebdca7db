"""Messages over a stream socket: four bytes that say how long, and that much JSON."""

from __future__ import annotations

import json
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
        """Raises OSError when nobody is there to read."""
        body = json.dumps(message).encode()
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def is_ready(self) -> bool:
        """Whether a whole message lies here, so that nothing of the socket tells of it."""
        size = self._size()
        return size is not None and len(self._received) >= LENGTH.size + size

    def receive(self) -> Message:
        """Waits for a message. Raises ConnectionError once the other side is gone."""
        while not self.is_ready():
            data = self._connection.recv(CHUNK)
            if not data:
                raise ConnectionError("the other side has closed the socket")
            self._received += data
        end = LENGTH.size + (self._size() or 0)
        body = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        message: Message = json.loads(body)
        return message

    def close(self) -> None:
        self._connection.close()

    def _size(self) -> int | None:
        if len(self._received) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._received)
        return int(size)
