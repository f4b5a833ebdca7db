"""Which decoder layers are known to chains of kernels, and the weights that those read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from caldera.models.exact_norm import epsilon_of, kind_of
from caldera.models.forward import base_module, decoder_layers
from caldera.rollout.native.layers import LAYERS, LAYERS_WITH_HEAD_NORMS, TRUNKS
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

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        matrices = (self.inward, self.outward, self.gates, self.down)
        return tuple(matrix.shape for matrix in matrices)


def known_layers(module: nn.Module) -> list[LayerWeights] | None:
    """Those of the twin's module, if all are known, and alike."""
    trunk = cast(Any, base_module(module).base_model)
    is_known = (
        type(trunk) in TRUNKS
        and type(trunk.embed_tokens) is nn.Embedding
        and kind_of(trunk.norm) is False
        and trunk.rotary_emb.rope_type in ROTATIONS
    )
    layers = [_known(layer) for layer in decoder_layers(module)] if is_known else [None]
    if None in layers:
        return None
    known = cast(list[LayerWeights], layers)
    is_alike = len({layer.sizes for layer in known}) == len(_numbers(module, trunk.norm)) == 1
    return known if is_alike else None


def _numbers(module: nn.Module, last: nn.Module) -> set[tuple[float, ...]]:
    """What is added to squares and multiplies scores, in all layers and the last norm."""
    found: set[tuple[float, ...]] = set()
    for layer in cast(list[Any], decoder_layers(module)):
        found |= {(epsilon_of(norm), layer.self_attn.scaling) for norm in (*_norms(layer), last)}
    return found


def _norms(layer: Any) -> list[Any]:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if type(layer) in LAYERS_WITH_HEAD_NORMS:
        norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    return norms


def _known(layer: nn.Module) -> LayerWeights | None:
    if type(layer) not in LAYERS + LAYERS_WITH_HEAD_NORMS:
        return None
    parts = cast(Any, layer)
    attention, mlp = parts.self_attn, parts.mlp
    is_mistral = type(layer).__name__.startswith("Mistral")
    window = getattr(attention.config if is_mistral else attention, "sliding_window", None)
    inward, gates = joint_product(attention, "q_proj"), joint_product(mlp, "gate_proj")
    outward, down = attention.o_proj, mlp.down_proj
    if inward is None or gates is None or gates.bias is not None or window is not None:
        return None
    plain = all(type(each) is nn.Linear and each.bias is None for each in (outward, down))
    norms = _norms(parts)
    width, inner = gates.weight.shape[1], gates.weight.shape[0] // 2
    fits = (
        plain
        and all(kind_of(norm) is False for norm in norms)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and attention.head_dim in HEAD_WIDTHS
        and width % 16 == 0 and inner % 16 == 0
    )  # fmt: skip
    if not fits:
        return None
    before, between, *heads = (norm.weight for norm in norms)
    return LayerWeights(
        inward.weight, inward.bias, outward.weight, gates.weight, down.weight, before, between,
        (heads[0], heads[1]) if heads else (None, None),
    )  # fmt: skip
