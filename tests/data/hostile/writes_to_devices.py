# ruff: noqa
# task: output
# ends: failed: Read-only file system
open("/dev/evil", "w").close()
print(42)
