"""What is mixed into vLLM's workers, so that they read weights from shared memory."""

from __future__ import annotations

from typing import Any

from .buckets import Bucket, read_buckets


class WeightReader:
    """vLLM finds the class by its name, in whatever process a worker is."""

    def read_weights(self: Any, buckets: list[Bucket]) -> None:
        """All of them in one go: vLLM takes nothing less as a whole update."""
        self.reload_weights(weights_iterator=read_buckets(buckets))
