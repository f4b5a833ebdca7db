# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
with open("/proc/self/environ", "rb") as file:
    file.read(1)
print(42)
