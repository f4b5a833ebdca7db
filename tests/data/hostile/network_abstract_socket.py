# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.socket(socket.AF_UNIX).bind("\0x")
print(42)
