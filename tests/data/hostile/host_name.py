# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.sethostname("evil")
print(42)
