# ruff: noqa
# task: output
# ends: failed
import ctypes

ctypes.string_at(0)
print(42)
