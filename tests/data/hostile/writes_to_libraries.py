# ruff: noqa
# task: output
# ends: failed: Read-only file system
open("/usr/lib/evil", "w").close()
print(42)
