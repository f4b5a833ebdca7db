"""Decode steps on CUDA: graphs, programmatic dependent launch, sampling on the device."""
