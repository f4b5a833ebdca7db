# ruff: noqa
# task: function
# ends: output limit|out of memory|failed|timed out
import os


def multiply(a, b):
    while True:
        os.write(3, b"x" * 65536)
