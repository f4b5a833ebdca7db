# ruff: noqa
# task: output
# ends: failed: No space left|File too large
with open("big", "wb") as file:
    for _ in range(100):
        file.write(bytes(2**20))
print(42)
