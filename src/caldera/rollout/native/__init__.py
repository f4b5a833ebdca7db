"""Caldera's own sampler: continuous batching over a paged key/value cache, on any device."""
