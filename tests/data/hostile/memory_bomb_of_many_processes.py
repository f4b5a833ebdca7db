# ruff: noqa
# task: output
# ends: out of memory
import os
import time

for _ in range(6):
    if os.fork() == 0:
        kept = bytearray(b"x") * (60 * 2**20)
        time.sleep(60)
time.sleep(60)
print(42)
