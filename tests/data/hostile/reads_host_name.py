# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
with open("/proc/sys/kernel/hostname", "rb") as file:
    file.read(1)
print(42)
