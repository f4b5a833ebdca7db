# ruff: noqa
# task: output
# ends: output limit
import sys

while True:
    sys.stderr.write("x" * 65536)
