# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
print(42)
