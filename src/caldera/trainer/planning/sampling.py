"""Bytes on one device while the native sampler samples."""

from __future__ import annotations

from dataclasses import dataclass

from caldera.rollout.native.blocks import PAGE_SIZE, pages_for
from caldera.trainer.planning.memory import FLOAT32, Parts
from caldera.trainer.planning.shapes import ModelShape

DRAWING = 20
"""Bytes of a logit while a token is drawn: logits, log-probs, probs, and a sum in float64."""
FILTERING = 40
"""The same where top-k or top-p look for the most likely ones first."""


@dataclass(frozen=True)
class Sampler:
    """What the sampler is told, and how much it is asked for."""

    shape: ModelShape
    sample_bytes: int
    """Of the precision in which it samples."""
    copies_weights: bool
    """Whether it has weights of its own beside the trainer's."""
    samples: int
    """Those that a rank, or the ranks that sample together, are asked for at once."""
    prompt_tokens: int
    response_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    filters: bool = False
    pages: int | None = None
    """rollout.kv_cache_blocks."""
    ranks: int = 1
    """Those that sample together: each has its part of the layers' matrices and of the cache."""

    @property
    def weights(self) -> int:
        if not self.copies_weights:
            return 0
        shared = self.shape.matrices // self.ranks
        return (self.shape.parameters - self.shape.matrices + shared) * self.sample_bytes

    @property
    def page_bytes(self) -> int:
        return 2 * self.shape.layers * PAGE_SIZE * self._kv_width * self.sample_bytes

    @property
    def _kv_width(self) -> int:
        return self.shape.kv_width // self.ranks

    @property
    def sequence_pages(self) -> int:
        """Of one sample at its longest."""
        return pages_for(self.prompt_tokens + self.response_tokens)

    @property
    def useful_pages(self) -> int:
        """As many as all sequences that are sampled together could fill."""
        return self.pages or self.sequence_pages * min(self.samples, self.max_num_seqs)

    def work(self) -> int:
        """What one forward pass and the drawing of tokens need besides weights and cache."""
        shape, rows = self.shape, min(self.samples, self.max_num_seqs)
        drawn = rows * shape.vocabulary * (FILTERING if self.filters else DRAWING)
        gathered = 2 * rows * (self.prompt_tokens + self.response_tokens) * self._kv_width
        prefilled = min(max(self.max_num_batched_tokens, self.prompt_tokens),
                        self.samples * self.prompt_tokens)  # fmt: skip
        widths = 4 * shape.inner // self.ranks * self.sample_bytes + 3 * FLOAT32 * shape.hidden
        return max(drawn, gathered * self.sample_bytes, prefilled * widths)


def sampling(sampler: Sampler, budget: int | None = None) -> Parts:
    """While answers are sampled; the cache takes no more than `budget` bytes of the device."""
    cache = sampler.useful_pages * sampler.page_bytes
    if budget is not None and sampler.pages is None:
        cache = min(cache, max(0, budget) // sampler.page_bytes * sampler.page_bytes)
    return {
        "sampler's weights": sampler.weights,
        "key/value cache": cache,
        "activations": sampler.work(),
    }
