"""Fused CPU forward: models of the commonest shape, run in a few operations a layer.

transformers writes a layer as some forty small operations, each of which costs more than what it
computes where a few tokens are decoded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.exact_norm import epsilon_of
from caldera.models.forward import base_module
from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.kernels import TILE, CpuKernels, Matrices
from caldera.rollout.native.cpu.weights import SMALLEST_PACKED, HeldWeight, PackedWeight
from caldera.rollout.native.layers import LayerParts, has_known_layers

# ---- Layers whose matrices are so small that calls cost more than their work: one call a layer


class TiledWeight(HeldWeight):
    """For the kernels: (N, K) as (N / TILE, K, TILE)."""

    def _laid_out(self, whole: Tensor) -> Tensor:
        return whole.view(-1, TILE, whole.shape[1]).transpose(1, 2).contiguous()

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of the matrix, and of the bias if there is one."""
        assert self._packed is not None, "it is packed before it is used"
        return self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()


class SmallLayer:
    """The forward pass of a decoder layer."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        first, second = parts.scales
        self._qkv_proj = TiledWeight.of(*parts.qkv_proj, scale=first)
        self._others = [
            TiledWeight.of(parts.o_proj),
            TiledWeight.of(parts.gate, scale=second),
            TiledWeight.of(parts.up, scale=second),
            TiledWeight.of(parts.down),
        ]
        self._width = sum(linear.out_features for linear in parts.qkv_proj)
        self._sizes = parts.down.out_features, parts.down.in_features
        self.packs = [self._qkv_proj, *self._others]

    @staticmethod
    def fits(parts: LayerParts) -> bool:
        others = (parts.o_proj, parts.gate, parts.up, parts.down)
        joint = sum(linear.out_features for linear in parts.qkv_proj)
        widths = [joint, *(linear.out_features for linear in others)]
        return (
            all(width % TILE == 0 for width in widths)
            and all(linear.bias is None for linear in others)
            and max(joint, parts.gate.out_features) * parts.gate.in_features < SMALLEST_PACKED
        )

    def __call__(
        self, values: Tensor, turn: tuple[Tensor, Tensor], attention: CompiledAttention
    ) -> Tensor:
        """values (T, H), which are changed."""
        parts = self._parts
        matrices = Matrices(
            *self._qkv_proj.addresses,
            *(weight.addresses[0] for weight in self._others),
            *self._sizes,
            *parts.epsilons,
            values.data_ptr(),
        )
        heads = parts.heads(values.new_empty(len(values), self._width))
        attention.run_layer(parts.attention, heads, turn, matrices)
        return values


def can_fuse(module: nn.Module) -> bool:
    """Whether a model is of a shape that is known here: with adapters it is not, say."""
    if not has_known_layers(module):
        return False
    backbone = cast(Any, base_module(module).base_model)
    is_complete = len(backbone.layers) == backbone.config.num_hidden_layers
    return is_complete and all(_has_plain_matrices(layer) for layer in backbone.layers)


def _has_plain_matrices(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    qkv_proj = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*qkv_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len({linear.bias is None for linear in qkv_proj}) == 1
        and mlp.gate_proj.weight.dtype == torch.float32  # norms become part of the weights
    )


class FusedBackbone:
    """From tokens to hidden states."""

    def __init__(self, module: nn.Module, kernels: CpuKernels) -> None:
        backbone = cast(Any, base_module(module).base_model)
        self._kernels = kernels
        self._embed, self._angles, self._norm = (
            backbone.embed_tokens,
            backbone.rotary_emb,
            backbone.norm,
        )
        parts = [LayerParts(layer) for layer in backbone.layers]
        self._layers: list[FusedLayer | SmallLayer] = [
            SmallLayer(each) if SmallLayer.fits(each) else FusedLayer(each, kernels)
            for each in parts
        ]
        self.packs = [pack for layer in self._layers for pack in layer.packs]

    def __call__(self, tokens: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """tokens and positions (1, T); returns (T, H)."""
        assert isinstance(attention, CompiledAttention), "what else there is knows no turns"
        values = self._embed(tokens)
        cos, sin = (angle[0].contiguous() for angle in self._angles(values, positions))  # (T, D)
        values = values[0]
        for layer in self._layers:
            values = layer(values, (cos, sin), attention)
        normed = self._kernels.normalise(values, epsilon_of(self._norm))
        return normed.mul_(self._norm.weight)


class FusedLayer:
    """The forward pass of a decoder layer: five products, and the operations between them."""

    def __init__(self, parts: LayerParts, kernels: CpuKernels) -> None:
        self._parts = parts
        self._kernels = kernels
        first, second = parts.scales
        self._qkv_proj = PackedWeight.of(*parts.qkv_proj, scale=first)
        self._o_proj = PackedWeight.of(parts.o_proj)
        self._gate = PackedWeight.of(parts.gate, scale=second)
        self._up = PackedWeight.of(parts.up, scale=second)
        self._down = PackedWeight.of(parts.down)
        self.packs = [self._qkv_proj, self._o_proj, self._gate, self._up, self._down]

    def __call__(
        self, values: Tensor, turn: tuple[Tensor, Tensor], attention: CompiledAttention
    ) -> Tensor:
        """values (T, H)."""
        parts = self._parts
        heads = parts.heads(self._qkv_proj(self._kernels.normalise(values, parts.epsilons[0])))
        found = attention.turn_and_attend(parts.attention, heads, turn)
        values = self._o_proj.added(found.flatten(1), values)
        normed = self._kernels.normalise(values, parts.epsilons[1])
        return self._down.added(self._up.gated(normed, self._gate.swished(normed)), values)
