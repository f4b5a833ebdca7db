# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0, 2**20, 0o1666) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
