# ruff: noqa
# task: output
# ends: failed: PermissionError
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(8)
part = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
if libc.process_vm_readv(1, part, 1, part, 1, 0) < 0:
    raise OSError(ctypes.get_errno(), "refused")
print(42)
