# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.listdir("/home")
print(42)
