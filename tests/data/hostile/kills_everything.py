# ruff: noqa
# task: output
# ends: failed: ProcessLookupError|nobody
import os
import signal
import sys

os.kill(-1, signal.SIGKILL)
sys.exit("nobody else was there")
