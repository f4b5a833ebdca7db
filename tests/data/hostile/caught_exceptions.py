# ruff: noqa
# task: output
# ends: timed out
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
