# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.symlink("../" * 30 + "etc/passwd", "link")
open("link").read()
print(42)
