# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes
import platform

libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 248, "aarch64": 217}[platform.machine()]
if libc.syscall(number, b"user", b"x", b"x", 1, -3) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
