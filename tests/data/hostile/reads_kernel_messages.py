# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
with open("/dev/kmsg", "rb") as file:
    file.read(1)
print(42)
