# ruff: noqa
# task: output
# ends: timed out
kept = []
while True:
    try:
        kept.append(bytearray(2**20))
    except MemoryError:
        pass
