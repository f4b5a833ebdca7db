# ruff: noqa
# task: function
# ends: timed out
import time


def multiply(a, b):
    time.sleep(1e6)
