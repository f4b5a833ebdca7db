# ruff: noqa
# task: output
# ends: failed: URLError
import urllib.request

urllib.request.urlopen("http://1.1.1.1/", timeout=0.3)
print(42)
