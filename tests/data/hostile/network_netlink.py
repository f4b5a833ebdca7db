# ruff: noqa
# task: output
# ends: failed: PermissionError
import socket

socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
print(42)
