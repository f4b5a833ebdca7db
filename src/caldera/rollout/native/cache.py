"""The key/value cache: pages of tokens, the same for every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from caldera.errors import RolloutError, UnsupportedError
from caldera.heap import trim_heap
from caldera.rollout.native.blocks import PAGE_SIZE

CPU_CACHE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class CacheShape:
    """The keys and values of one token in the cache."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype, ranks: int = 1) -> CacheShape:
        """On each of so many ranks that share the heads."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            heads=(getattr(text, "num_key_value_heads", None) or heads) // ranks,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            dtype=dtype,
        )

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * PAGE_SIZE * self.heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer, (pages, PAGE_SIZE, Hkv, D) each."""

    def __init__(self, shape: CacheShape, pages: int, device: torch.device) -> None:
        self.pages = pages
        size = (pages, PAGE_SIZE, shape.heads, shape.head_dim)
        # zeros, not empty: masked positions are multiplied by 0, and 0 * NaN is NaN
        self.keys = [
            torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)
        ]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self._kept: list[int] = []

    def begin_pass(self) -> None:
        self._kept.clear()

    def check_pass(self, model: str) -> None:
        """Refuse a model of which not every layer has kept keys and values in its turn, once."""
        if self._kept != list(range(len(self.keys))):
            raise UnsupportedError(
                f"{model} has {len(self.keys)} layers, of which these attended, in this order: "
                f"{self._kept}; takes each of them once"
            )

    def grow(self, pages: int) -> None:
        """Have this many pages, the first of them those of now. Layer by layer, so that no more
        than one is there twice."""
        self.pages = pages
        for layers in (self.keys, self.values):
            for layer, old in enumerate(layers):
                layers[layer] = old.new_zeros(pages, *old.shape[1:])
                layers[layer][: len(old)] = old

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values (T, Hkv, D) of tokens at their slots (T,)."""
        self.check(layer, key, value)
        for pages, new in ((self.keys[layer], key), (self.values[layer], value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, new.to(pages.dtype))

    def check(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Refuse keys and values that are not as the cache has them, and note the others."""
        self._kept.append(layer)
        promised = self.keys[layer].shape[2:]
        for new in (key, value):
            if new.shape[1:] != promised:
                raise UnsupportedError(
                    f"layer {layer} has keys or values of shape {tuple(new.shape[1:])}, "
                    f"the model's config promises {tuple(promised)} (heads, head_dim)"
                )

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        for pages in (*self.keys, *self.values):
            pages.index_copy_(0, targets, pages.index_select(0, sources))


def give_back_memory(device: torch.device) -> None:
    """Return freed memory to the system, not to a list of the allocator's own."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()


def affordable_pages(
    shape: CacheShape, device: torch.device, gpu_memory_utilization: float, held: int = 0
) -> int:
    """Pages that the device has memory for, apart from what it holds already.

    `held` is how much of that a cache holds whose place the pages would take.
    """
    if device.type != "cuda":
        return CPU_CACHE_BYTES // shape.page_bytes
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    budget = int(gpu_memory_utilization * total) - (total - free - reusable - held)
    if budget < shape.page_bytes:
        raise RolloutError(
            f"no memory for the key/value cache: rollout.gpu_memory_utilization="
            f"{gpu_memory_utilization} of {total / 2**30:.1f} GiB is filled already "
            f"({(total - free - reusable) / 2**30:.1f} GiB in use)"
        )
    return budget // shape.page_bytes


def too_small(who: str, needed: int, pages: int) -> RolloutError:
    return RolloutError(
        f"{who} needs {needed} pages of {PAGE_SIZE} tokens, the key/value cache has {pages}: "
        "set rollout.kv_cache_blocks or rollout.gpu_memory_utilization higher, or "
        "rollout.response_length lower"
    )
