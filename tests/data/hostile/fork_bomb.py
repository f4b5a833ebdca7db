# ruff: noqa
# task: output
# ends: failed: BlockingIOError
import os

while True:
    os.fork()
