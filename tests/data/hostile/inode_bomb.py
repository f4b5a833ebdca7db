# ruff: noqa
# task: output
# ends: failed: No space left
import os

for name in range(100_000):
    os.mkdir(f"folder{name}")
print(42)
