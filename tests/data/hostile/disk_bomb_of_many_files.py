# ruff: noqa
# task: output
# ends: failed: No space left
for name in range(100):
    with open(f"file{name}", "wb") as file:
        file.write(bytes(2**20))
print(42)
