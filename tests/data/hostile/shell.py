# ruff: noqa
# task: output
# ends: failed: FileNotFoundError
import subprocess

subprocess.run(["/bin/sh", "-c", "cat /etc/passwd"], check=True)
print(42)
