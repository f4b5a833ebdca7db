# ruff: noqa
# task: output
# ends: failed: no secrets
import os
import sys

if set(os.environ) <= {
    "HOME",
    "LANG",
    "LC_CTYPE",
    "PATH",
    "PWD",
    "PYTHONHASHSEED",
    "PYTHONDONTWRITEBYTECODE",
}:
    sys.exit("no secrets")
print(42)
