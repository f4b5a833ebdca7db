# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.create_server(("127.0.0.1", 0))
print(42)
