# ruff: noqa
# task: output
# ends: timed out
import os
import signal

os.kill(os.getpid(), signal.SIGSTOP)
print(42)
