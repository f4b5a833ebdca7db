"""Decode steps on CUDA: recorded, chained, and sampled on the device."""
