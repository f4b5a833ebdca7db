# ruff: noqa
# task: output
# ends: out of memory
import mmap
import os
import time

for _ in range(6):
    if os.fork() == 0:
        kept = mmap.mmap(-1, 60 * 2**20)
        for _ in range(60):
            kept.write(bytes(2**20))
        time.sleep(60)
time.sleep(60)
print(42)
