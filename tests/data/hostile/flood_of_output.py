# ruff: noqa
# task: output
# ends: output limit
while True:
    print("x" * 65536)
