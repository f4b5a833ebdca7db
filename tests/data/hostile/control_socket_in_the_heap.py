# ruff: noqa
# task: output
# ends: failed: none is open
import gc
import os
import socket
import sys

gc.unfreeze()
for value in gc.get_objects():
    if isinstance(value, socket.socket) and value.fileno() >= 0:
        os.fstat(value.fileno())
        print(42)
        break
else:
    sys.exit("none is open")
