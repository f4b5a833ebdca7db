# ruff: noqa
# task: output
# ends: failed: Too many open files
import os

kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1000)]
print(42)
