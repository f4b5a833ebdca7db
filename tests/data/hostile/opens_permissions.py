# ruff: noqa
# task: output
# ends: failed: Read-only file system|PermissionError
import os

os.chmod(os.__file__, 0o777)
print(42)
