# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import os

os.symlink("/etc/passwd", "link")
open("link").read()
print(42)
