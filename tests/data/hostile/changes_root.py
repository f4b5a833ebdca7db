# ruff: noqa
# task: output
# ends: failed: PermissionError
import os

os.chroot(".")
print(42)
