"""`python -I -S warm_client.py SOCKET -m MODULE ARGUMENTS`: as `python -m MODULE ARGUMENTS`, soon.

A copy of warm_server.py does the work. Signals go there, its exit status comes back, and it is
killed when this is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> int:
    path, *arguments = sys.argv[1:]
    command = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(command).encode()], [0, 1, 2])
        pid = int(server.recv(99))

        def forward(number: int, _: object) -> None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

        for number in FORWARDED:
            signal.signal(number, forward)
        status = int(server.recv(99) or -signal.SIGKILL)  # the server is gone, and all with it
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
