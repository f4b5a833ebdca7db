# ruff: noqa
# task: output
# ends: timed out
import re

re.match("(a+)+$", "a" * 64 + "b")
print(42)
