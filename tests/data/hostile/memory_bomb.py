# ruff: noqa
# task: output
# ends: out of memory: MemoryError
kept = []
for _ in range(100):
    kept.append(bytearray(2**24))
print(42)
