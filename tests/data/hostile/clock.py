# ruff: noqa
# task: output
# ends: failed: PermissionError
import time

time.clock_settime(time.CLOCK_REALTIME, 0)
print(42)
