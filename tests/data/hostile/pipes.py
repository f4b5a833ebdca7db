# ruff: noqa
# task: output
# ends: failed: Too many open files
import os

kept = []
for _ in range(1000):
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    os.write(ends[1], bytes(60_000))
    kept.append(ends)
print(42)
