# ruff: noqa
# task: output
# ends: timed out
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
