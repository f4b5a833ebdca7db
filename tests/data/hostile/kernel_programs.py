# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes
import platform

libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 321, "aarch64": 280}[platform.machine()]
if libc.syscall(number, 0, None, 0) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
