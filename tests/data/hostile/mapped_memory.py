# ruff: noqa
# task: output
# ends: failed: Cannot allocate memory
import mmap

kept = mmap.mmap(-1, 2**31)
print(42)
