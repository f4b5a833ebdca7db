# ruff: noqa
# task: output
# ends: failed: gaierror|PermissionError
import socket

socket.getaddrinfo("example.org", 80)
print(42)
