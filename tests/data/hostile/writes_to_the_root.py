# ruff: noqa
# task: output
# ends: failed: Read-only file system
open("/evil", "w").close()
print(42)
