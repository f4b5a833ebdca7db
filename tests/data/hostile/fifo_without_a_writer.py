# ruff: noqa
# task: output
# ends: timed out
import os

os.mkfifo("fifo")
open("fifo").read()
print(42)
