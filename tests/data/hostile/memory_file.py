# ruff: noqa
# task: output
# ends: failed: PermissionError
import os

os.write(os.memfd_create("x"), b"x" * 2**20)
print(42)
