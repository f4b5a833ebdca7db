# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"proc", b"/box", b"proc", 0, None) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
