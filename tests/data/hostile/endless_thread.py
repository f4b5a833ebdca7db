# ruff: noqa
# task: output
# ends: timed out
import threading
import time

threading.Thread(target=time.sleep, args=(1e6,)).start()
print(42)
