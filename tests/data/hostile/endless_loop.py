# ruff: noqa
# task: output
# ends: timed out
while True:
    pass
