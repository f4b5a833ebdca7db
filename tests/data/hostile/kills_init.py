# ruff: noqa
# task: output
# ends: timed out
import os
import signal
import time

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP):
    os.kill(1, number)
while os.getppid() == 1:
    time.sleep(0.1)
print(42)
