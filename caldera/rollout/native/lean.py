"""Decoder layers of the commonest shape in fewer operations, with packed weights on a CPU.

transformers writes a layer as some forty small operations, each of which costs more than what it
computes where a few tokens are decoded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.exact_norm import epsilon_of, kind_of
from caldera.rollout.native.packed_weights import SMALLEST, PackedWeight

LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "MistralDecoderLayer")
"""Whose queries and keys are rotated as they come, by halves."""


def is_lean(layer: nn.Module) -> bool:
    """Whether a layer is of a shape that is known here: with adapters it is not, say."""
    if type(layer).__name__ not in LAYERS:
        return False
    parts = cast(Any, layer)
    attention, mlp = parts.self_attn, parts.mlp
    inward = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*inward, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len({linear.bias is None for linear in inward}) == 1
        and mlp.gate_proj.weight.numel() >= SMALLEST
        and mlp.gate_proj.weight.dtype == torch.float32  # norms become part of the weights
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and kind_of(parts.input_layernorm) is False
        and kind_of(parts.post_attention_layernorm) is False
    )


class Rotation:
    """By angles that all layers of a pass share."""

    def __init__(self) -> None:
        self._sin: Tensor | None = None
        self._signed = torch.empty(0)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """heads (T, H, D); cos and sin (1, T, D)."""
        half = sin.shape[-1] // 2
        if sin is not self._sin:
            self._sin = sin
            self._signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]
        return torch.addcmul(heads * cos[0, :, None], heads.roll(half, -1), self._signed)


class LeanLayer:
    """The forward pass of a decoder layer."""

    def __init__(self, layer: nn.Module, rotation: Rotation) -> None:
        parts = cast(Any, layer)
        attention, mlp = parts.self_attn, parts.mlp
        self._attention = attention
        self._rotation = rotation
        first, second = parts.input_layernorm, parts.post_attention_layernorm
        self._epsilons = epsilon_of(first), epsilon_of(second)
        self._head_dim = attention.head_dim
        queries = attention.q_proj.out_features // self._head_dim
        keys = attention.k_proj.out_features // self._head_dim
        self._sizes, self._sizes_of_turned = [queries + keys, keys], [queries, keys]
        is_mistral = type(layer).__name__.startswith("Mistral")
        self._window = getattr(
            attention.config if is_mistral else attention, "sliding_window", None
        )
        inward = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._inward = PackedWeight.of(*inward, scale=first.weight)
        self._outward = PackedWeight.of(attention.o_proj)
        self._gate = PackedWeight.of(mlp.gate_proj, scale=second.weight)
        self._up = PackedWeight.of(mlp.up_proj, scale=second.weight)
        self._down = PackedWeight.of(mlp.down_proj)
        self.packs = [self._inward, self._outward, self._gate, self._up, self._down]

    def __call__(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        context: AttentionContext,
        **__: Any,
    ) -> Tensor:
        """hidden_states (1, T, H)."""
        values = hidden_states[0]
        heads = self._inward(_normed(values, self._epsilons[0])).unflatten(-1, (-1, self._head_dim))
        turned, told = heads.split_with_sizes(self._sizes, 1)
        turned = self._rotation.rotate(turned, *position_embeddings)
        query, key = turned.split_with_sizes(self._sizes_of_turned, 1)
        found = context.attend(
            self._attention, query, key, told, self._attention.scaling, self._window
        )
        values = self._outward.added(found.flatten(1), values)
        normed = _normed(values, self._epsilons[1])
        gated = self._up.gated(normed, self._gate(normed, "swish"))
        return self._down.added(gated, values)[None]


def _normed(values: Tensor, epsilon: float) -> Tensor:
    """values (T, H), each row over the root of its mean square; the norm's weight is packed."""
    size: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)  # (T, 1)
    return values * size.square_().div_(values.shape[-1]).add_(epsilon).rsqrt_()
