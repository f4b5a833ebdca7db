"""Which decoder layers are known to chains of kernels, and the weights that those read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from caldera.models.exact_norm import epsilon_of
from caldera.models.forward import base_module
from caldera.rollout.native.layers import has_known_layers, norms_of, window_of
from caldera.rollout.native.stacks import joint_product

HEAD_WIDTHS = (64, 128)
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Whose angle at a position is always the same."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights that the kernels read, which are the twin's."""

    inward: Tensor  # ((Hq + 2 Hkv) D, H)
    bias: Tensor | None
    outward: Tensor  # (H, Hq D)
    gates: Tensor  # (2 I, H)
    down: Tensor  # (H, I)
    before: Tensor  # (H,) the norms' weights
    between: Tensor
    head_norms: tuple[Tensor, Tensor] | tuple[None, None]  # (D,) of queries and keys
    epsilon: float  # of all norms
    scale: float  # of scores

    @property
    def numbers(self) -> tuple[object, ...]:
        """What is the same in all layers."""
        matrices = (self.inward, self.outward, self.gates, self.down)
        return self.epsilon, self.scale, *(matrix.shape for matrix in matrices)


def known_layers(module: nn.Module) -> list[LayerWeights] | None:
    """Those of the twin's module, if all are known, and alike."""
    trunk = cast(Any, base_module(module).base_model)
    if not has_known_layers(module) or trunk.rotary_emb.rope_type not in ROTATIONS:
        return None
    epsilon = epsilon_of(trunk.norm)
    layers = [_weights(layer, epsilon) for layer in trunk.layers]
    known = [layer for layer in layers if layer is not None]
    is_alike = len({layer.numbers for layer in known}) == 1
    return known if len(known) == len(layers) and is_alike else None


def _weights(layer: Any, epsilon: float) -> LayerWeights | None:
    """None if the layer cannot be chained. `epsilon`: of the last norm."""
    attention, mlp, norms = layer.self_attn, layer.mlp, norms_of(layer)
    inward, gates = joint_product(attention, "q_proj"), joint_product(mlp, "gate_proj")
    if inward is None or gates is None or gates.bias is not None or window_of(layer) is not None:
        return None
    others = (attention.o_proj, mlp.down_proj)
    width, inner = gates.weight.shape[1], gates.weight.shape[0] // 2
    fits = (
        all(type(each) is nn.Linear and each.bias is None for each in others)
        and all(epsilon_of(norm) == epsilon for norm in norms)
        and attention.head_dim in HEAD_WIDTHS
        and width % 16 == 0 and inner % 16 == 0
    )  # fmt: skip
    if not fits:
        return None
    outward, down = (each.weight for each in others)
    before, between, *heads = (cast(Tensor, norm.weight) for norm in norms)
    return LayerWeights(
        inward.weight, inward.bias, outward, gates.weight, down, before, between,
        (heads[0], heads[1]) if heads else (None, None), epsilon, attention.scaling,
    )  # fmt: skip
