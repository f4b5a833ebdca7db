# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.listdir("/var/log")
print(42)
