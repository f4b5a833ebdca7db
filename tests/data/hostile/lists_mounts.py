# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.listdir("/mnt")
print(42)
