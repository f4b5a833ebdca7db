# ruff: noqa
# task: output
# ends: failed: Too many levels
import os

os.symlink("link", "link")
open("link").read()
print(42)
