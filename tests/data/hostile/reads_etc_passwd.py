# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
with open("/etc/passwd", "rb") as file:
    file.read(1)
print(42)
