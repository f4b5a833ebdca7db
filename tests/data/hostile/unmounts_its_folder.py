# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
if libc.umount2(b"/box", 2) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
