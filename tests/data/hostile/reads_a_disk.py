# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
with open("/dev/vda", "rb") as file:
    file.read(1)
print(42)
