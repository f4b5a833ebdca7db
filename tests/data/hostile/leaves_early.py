# ruff: noqa
# task: output
# ends: ok
import os

os._exit(0)
