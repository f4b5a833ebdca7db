# ruff: noqa
# task: output
# ends: failed|out of memory
import sys

sys.setrecursionlimit(10**9)


def deeper():
    return [deeper() for _ in [0]]


deeper()
print(42)
