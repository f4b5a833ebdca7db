# ruff: noqa
# task: output
# ends: timed out
import os
import sys
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for end in range(3):
            os.close(end)
        time.sleep(30)
        open("done", "w").close()
        sys.exit()
while not os.path.exists("done"):
    time.sleep(0.1)
print(42)
