# ruff: noqa
# task: output
# ends: failed: PermissionError
import resource

no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
resource.prlimit(1, resource.RLIMIT_NPROC, no_limit)
resource.setrlimit(resource.RLIMIT_NPROC, no_limit)
print(42)
