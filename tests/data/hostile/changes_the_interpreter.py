# ruff: noqa
# task: output
# ends: failed: PermissionError|Read-only
import os

with open(os.__file__, "a") as file:
    file.write("evil = True")
print(42)
