"""One sampler over several ranks."""
