"""Steps on CPUs: packed weights and compiled kernels."""
