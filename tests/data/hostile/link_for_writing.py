# ruff: noqa
# task: output
# ends: failed: Read-only file system
import os

os.symlink("/usr/lib/evil", "link")
open("link", "w").close()
print(42)
