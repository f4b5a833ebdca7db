# ruff: noqa
# task: output
# ends: failed: wrong
import os
import sys
import time

if os.fork() == 0:
    os.setsid()
    time.sleep(30)
    print(42)
sys.exit("wrong")
