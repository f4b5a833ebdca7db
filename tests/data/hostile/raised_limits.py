# ruff: noqa
# task: output
# ends: failed: ValueError
import resource

no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
resource.setrlimit(resource.RLIMIT_AS, no_limit)
print(42)
