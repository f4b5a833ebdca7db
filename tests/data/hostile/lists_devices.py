# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.listdir("/sys")
print(42)
