# ruff: noqa
# task: output
# ends: failed: none
import os
import sys

if not os.listdir("/proc"):
    sys.exit("none")
print(42)
