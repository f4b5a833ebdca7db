# ruff: noqa
# task: output
# ends: failed: PermissionError|Invalid argument
import os

os.setuid(0)
print(42)
