# ruff: noqa
# task: output
# ends: timed out
import time

time.sleep(1e6)
print(42)
