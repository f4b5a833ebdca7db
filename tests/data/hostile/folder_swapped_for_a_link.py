# ruff: noqa
# task: output
# ends: failed: Read-only file system
import os

os.mkdir("folder")
os.rename("folder", "gone")
os.symlink("/usr/lib", "folder")
open("folder/evil", "w").close()
print(42)
