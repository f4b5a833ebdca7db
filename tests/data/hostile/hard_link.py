# ruff: noqa
# task: output
# ends: failed: OSError|PermissionError
import os

os.link(os.__file__, "link")
open("link", "a").close()
print(42)
