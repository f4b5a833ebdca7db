# ruff: noqa
# task: output
# ends: timed out
print(len(str(9**9**9)) and 42)
