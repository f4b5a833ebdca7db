# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.listdir("/root")
print(42)
