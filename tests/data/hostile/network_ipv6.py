# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.socket(socket.AF_INET6).connect(("::1", 80))
print(42)
