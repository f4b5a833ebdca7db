"""Bytes on one device while a model trains, or computes without training.

Widths are those of a token: H hidden, I inner, Q queries, K keys. `c` are the bytes of the
computation's precision, `r` those of the parameters', in which the residual stream is kept. What a
compiled decoder layer keeps of a token for its backward pass was fitted to measured peaks:

    c (3 I + 2 Q + 2 K + 2 H) + r H     gate, up, product; query, attended; key, value; two inputs
                                        of matrices; one residual

Besides, the head has a chunk of logits, its gradient in float32 and a copy in the computation's
precision. Peaks are the largest of the moments named in `_training_moments`. What is meant are the
bytes of tensors: `torch.cuda.max_memory_allocated`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedConfig

from caldera.errors import UnsupportedError
from caldera.models.flops import Arithmetic
from caldera.models.forward import base_module
from caldera.models.head import CUDA_BYTES_PER_CHUNK
from caldera.rollout.native.blocks import PAGE_SIZE, pages_for

# ---- The sizes of a model that decide how much memory it takes


@dataclass(frozen=True)
class ModelShape:
    """Counts and widths; bytes are somebody else's."""

    parameters: int
    trained: int
    """Those that are not frozen."""
    matrices: int
    """Parameters of the decoder layers' matrices: those that are cast where computation is in
    another precision than they are kept in."""
    embeddings: int
    """Parameters of the input embedding, and of the language head where that is not the same."""
    head: int
    """Parameters of the language head; 0 for a classifier."""
    layers: int
    hidden: int
    inner: int
    """Width between the matrices of a gated layer."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    """Whether the language head is the input embedding."""

    @classmethod
    def of(cls, module: nn.Module) -> ModelShape:
        """Of a module that may be on the meta device."""
        model = base_module(module)
        whole: PreTrainedConfig = model.config
        config = whole.get_text_config()
        if not Arithmetic.of(module).is_known or not hasattr(config, "intermediate_size"):
            raise UnsupportedError(
                f"{type(model).__name__}: memory is worked out for dense decoders alone, not for "
                "mixtures of experts"
            )
        parameters = list(module.parameters())
        head = model.get_output_embeddings()
        tables = [
            cast(Tensor, part.weight)
            for part in (model.get_input_embeddings(), head)
            if part is not None
        ]
        embeddings = {id(table): table.numel() for table in tables}
        count = sum(parameter.numel() for parameter in parameters)
        vectors = sum(parameter.numel() for parameter in parameters if parameter.dim() < 2)
        heads = config.num_attention_heads
        return cls(
            parameters=count,
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            matrices=count - sum(embeddings.values()) - vectors,
            embeddings=sum(embeddings.values()),
            head=0 if head is None else head.weight.numel(),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=0 if head is None else config.vocab_size,
            is_tied=head is not None and len(embeddings) == 1,
        )

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of the keys of a token, and as much again of its values."""
        return self.kv_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer's matrices."""
        return self.matrices // self.layers


# ---- Bytes on one device while a model trains, or computes

FLOAT32 = 4
STATES = {"AdamW": 2, "Adam": 2, "SGD": 0}
"""Tensors that an optimiser keeps of each trained parameter, in its precision."""
GATHERED_LAYERS = 2
"""Layers that a sharded model has whole at the same time: one computes, the next one comes."""

Parts = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class Held:
    """A role's model, and how a rank holds it."""

    shape: ModelShape
    kept_bytes: int
    """Of a parameter, as it is kept and updated."""
    compute_bytes: int
    shards: int = 1
    """Ranks that parameters, gradients and optimiser are shared out to."""
    states: int = 2
    """Tensors of the optimiser for each trained parameter; -1: the model is frozen."""
    param_offload: bool = False
    optimizer_offload: bool = False
    checkpoints: bool = False
    """Layers are computed again in the backward pass."""
    activation_offload: bool = False
    compiles: bool = True

    @property
    def weights(self) -> int:
        return self._share(self.shape.parameters * self.kept_bytes)

    @property
    def gradients(self) -> int:
        return self._share(self.shape.trained * self.kept_bytes)

    @property
    def optimizer(self) -> int:
        return max(self.states, 0) * self.gradients

    @property
    def resident(self) -> Parts:
        """What is on the device even while others compute."""
        return {
            "weights": 0 if self.param_offload else self.weights,
            "optimiser": 0 if self.optimizer_offload else self.optimizer,
        }

    @property
    def computing(self) -> int:
        """Weights in the form in which they are computed with, where that is another one."""
        if self.shards > 1:
            gathered = self.shape.embeddings + GATHERED_LAYERS * self.shape.layer
            return gathered * self.compute_bytes
        return 0 if self.is_plain else self.shape.matrices * self.compute_bytes

    def saved(self, content: str) -> int:
        """Bytes of a checkpoint's content, of all ranks together."""
        shape = self.shape
        counts = {
            # A tied head is written under both of its names.
            "model": shape.parameters + (shape.head if shape.is_tied else 0),
            "optimizer": max(self.states, 0) * shape.trained,
            "hf_model": shape.parameters,
        }
        return counts.get(content, 0) * self.kept_bytes

    @property
    def is_plain(self) -> bool:
        """Whether parameters are kept in the precision of the computation."""
        return self.kept_bytes == self.compute_bytes

    def _share(self, count: int) -> int:
        return -(-count // self.shards)


@dataclass(frozen=True)
class Pass:
    """The largest micro-batch of a rank."""

    tokens: int
    predicted: int
    """Tokens at which something is computed: those of the answers."""
    accumulates: bool = False
    """Whether gradients of micro-batches before it are there."""


def training(held: Held, work: Pass) -> Parts:
    """While the model is trained."""
    gradients, activations = max(_training_moments(held, work), key=sum)
    return {
        "weights": held.weights,
        "optimiser": held.optimizer,
        "gradients": gradients,
        "activations": activations,
    }


def inference(held: Held, work: Pass) -> Parts:
    """While it computes without being trained."""
    shape, c = held.shape, held.compute_bytes
    residual = work.tokens * shape.hidden * held.kept_bytes
    layer = work.tokens * c * (3 * shape.inner + 2 * shape.attention_width + 2 * shape.hidden)
    eager = 0 if held.compiles else work.tokens * 2 * FLOAT32 * shape.hidden
    in_trunk = held.computing + 2 * residual + layer + eager
    in_head = 2 * residual + _logits(held, work) + (0 if held.is_plain else shape.head * c)
    if held.shards > 1:
        in_head += held.computing
    return {
        "weights": held.weights,
        "optimiser": held.resident["optimiser"],
        "activations": max(in_trunk, in_head),
    }


def _training_moments(held: Held, work: Pass) -> list[tuple[int, int]]:
    """(gradients, activations and what else comes and goes) at each moment that can be the peak."""
    shape, c = held.shape, held.compute_bytes
    before = held.gradients if work.accumulates else 0
    of_head = held._share(shape.head * held.kept_bytes) if shape.trained > shape.head else 0
    layer, kept = layer_bytes(held) * work.tokens, _kept(held) * work.tokens
    outer = work.tokens * shape.hidden * (FLOAT32 + 3 * held.kept_bytes)
    backward = work.tokens * c * (3 * shape.inner + 2 * shape.hidden)
    # The graph holds the weights that were cast, unless layers are computed again.
    cast = held.computing if held.shards > 1 or not held.checkpoints else 0
    recomputed = layer if held.checkpoints else 0
    gradient = shape.head * (FLOAT32 + c) if shape.trained > shape.head else 0
    in_head = _logits(held, work) + gradient + work.predicted * shape.hidden * c
    return [
        (before, kept + layer + held.computing),  # the forward pass is done
        (before, kept + outer + cast + in_head),
        (before + of_head, kept + outer + cast + recomputed + backward),  # the last layer
        (held.gradients, 0),  # the optimiser's step
    ]


def layer_bytes(held: Held) -> int:
    """What one decoder layer keeps of a token for its backward pass."""
    shape, c = held.shape, held.compute_bytes
    widths = 3 * shape.inner + 2 * shape.attention_width + 2 * shape.kv_width + 2 * shape.hidden
    compiled = c * widths + held.kept_bytes * shape.hidden + FLOAT32 * shape.heads
    if held.compiles:
        return compiled
    return compiled + c * shape.inner + 4 * FLOAT32 * shape.hidden  # what fusing saves


def _kept(held: Held) -> int:
    """What all layers keep of a token on the device."""
    if held.activation_offload:
        return 0
    if held.checkpoints:
        return held.shape.layers * held.shape.hidden * held.kept_bytes
    return held.shape.layers * layer_bytes(held)


def _logits(held: Held, work: Pass) -> int:
    every = work.predicted * held.shape.vocabulary * held.compute_bytes
    return min(CUDA_BYTES_PER_CHUNK, every)


# ---- Bytes on one device while the native sampler samples

DRAWING = 20
"""Bytes of a logit while a token is drawn: logits, log-probs, probs, and a sum in float64."""
FILTERING = 40
"""The same where top-k or top-p look for the most likely ones first."""


@dataclass(frozen=True)
class Sampler:
    """The sampler's settings, and how much is asked of it."""

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
        prefilled = min(
            max(self.max_num_batched_tokens, self.prompt_tokens), self.samples * self.prompt_tokens
        )
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
