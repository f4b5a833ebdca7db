# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(425, 8, ctypes.create_string_buffer(120)) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
