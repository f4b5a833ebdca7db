"""Weights on their way to an engine on the same GPU: one buffer there, filled again and again."""

from __future__ import annotations

import torch

from caldera.rollout.engines.files import NamedWeights, fill, in_buckets
from caldera.rollout.engines.host.caldera_engine.base import SteppedEngine
from caldera.rollout.engines.host.caldera_engine.buckets import checksum

Handle = list[object]


class CudaBuckets:
    """Pushes weights bucket by bucket; nothing of them is kept."""

    def __init__(self, dtype: torch.dtype, bucket_bytes: int, device: torch.device) -> None:
        """Weights go over in `dtype`; a bucket has `bucket_bytes`, or one tensor that is larger."""
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._device = device

    def push(self, stream: NamedWeights, engine: SteppedEngine) -> None:
        """Have an engine of another process read all weights of the stream, which may be on any
        device. The buffer is given back in the end."""
        buffer, first = torch.empty(0, dtype=torch.uint8, device=self._device), True
        for weights, size in in_buckets(stream, self._dtype, self._bucket_bytes):
            if size > len(buffer):
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            entries = fill(buffer, weights, self._dtype)
            found = checksum(buffer[:size])  # which waits until they are there
            # A handle each time: PyTorch counts them against those that were read and given back.
            handle = _handle(buffer)
            bucket = {"cuda": handle, "bytes": size, "checksum": found, "entries": entries}
            engine.load_bucket(bucket, first)
            first = False
        del buffer
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # the engine needs the memory now


def _handle(buffer: torch.Tensor) -> Handle:
    """How another process finds the buffer, as it can be written in JSON."""
    parts = buffer.untyped_storage()._share_cuda_()
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts]
