# ruff: noqa
# task: output
# ends: failed: PermissionError
import os
import stat

os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
print(42)
