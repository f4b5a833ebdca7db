# ruff: noqa
# task: output
# ends: timed out
import atexit
import time

atexit.register(time.sleep, 1e6)
print(42)
