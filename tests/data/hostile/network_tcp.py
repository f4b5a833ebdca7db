# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.create_connection(("1.1.1.1", 80), timeout=0.3)
print(42)
