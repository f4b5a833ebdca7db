"""The parts of a decoder layer of the commonest shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model

from caldera.models.exact_norm import epsilon_of, kind_of
from caldera.models.forward import base_module

LAYERS = (LlamaDecoderLayer, Qwen2DecoderLayer, MistralDecoderLayer)
"""Whose queries and keys are rotated as they come, by halves. A class of the same name that
came with a model may compute something else."""
LAYERS_WITH_HEAD_NORMS = (Qwen3DecoderLayer,)
"""The same, but each head of queries and keys has its norm first."""
BACKBONES = (LlamaModel, Qwen2Model, Qwen3Model, MistralModel)
"""Which do nothing between embedding, such layers and the last norm."""


def has_known_layers(module: nn.Module) -> bool:
    """Whether all layers are of these kinds, whatever they multiply by."""
    backbone = cast(Any, base_module(module).base_model)
    return (
        type(backbone) in BACKBONES
        and type(backbone.embed_tokens) is nn.Embedding
        and kind_of(backbone.norm) is False
        and all(
            type(layer) in LAYERS + LAYERS_WITH_HEAD_NORMS
            and all(kind_of(norm) is False for norm in norms_of(layer))
            and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
            for layer in backbone.layers
        )
    )


def norms_of(layer: Any) -> list[nn.Module]:
    """Before attention, behind it, and perhaps those of queries and keys."""
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if type(layer) in LAYERS_WITH_HEAD_NORMS:
        norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    return norms


def window_of(layer: Any) -> int | None:
    attention = layer.self_attn
    holder = attention.config if type(layer).__name__.startswith("Mistral") else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


@dataclass(frozen=True)
class HeadNorms:
    """Of each head before it is rotated: the weights (D,), as they are at the time."""

    query: Tensor
    key: Tensor
    epsilon: float


@dataclass(frozen=True)
class AttentionParts:
    """How a layer attends."""

    number: int
    scale: float
    window: int | None
    norms: HeadNorms | None = None


class LayerParts:
    """The products of a layer, and what it does between them."""

    def __init__(self, layer: nn.Module) -> None:
        parts = cast(Any, layer)
        attention, mlp = parts.self_attn, parts.mlp
        norms = norms_of(layer)
        self.epsilons = [epsilon_of(norm) for norm in norms[:2]]
        self.scales = [cast(Tensor, norm.weight) for norm in norms[:2]]
        self.qkv_proj: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.o_proj: nn.Linear = attention.o_proj
        self.gate: nn.Linear = mlp.gate_proj
        self.up: nn.Linear = mlp.up_proj
        self.down: nn.Linear = mlp.down_proj
        self._head_dim = attention.head_dim
        self._sizes = [linear.out_features // self._head_dim for linear in self.qkv_proj]
        head_norms = None
        if len(norms) > 2:
            query, key = (cast(Tensor, norm.weight) for norm in norms[2:])
            head_norms = HeadNorms(query, key, epsilon_of(norms[2]))
        self.attention = AttentionParts(
            attention.layer_idx, attention.scaling, window_of(layer), head_norms
        )

    def heads(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (T, H, D) of what lies behind each other, (T, N)."""
        heads = joint.view(len(joint), -1, self._head_dim).split_with_sizes(self._sizes, 1)
        return cast(tuple[Tensor, Tensor, Tensor], heads)


# ---- Layers that multiply the same input as one product, of which each hands out its part

STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that multiply the same input."""


def stackable(container: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """The layers of these names; none if they are not all there and plain, as with adapters."""
    layers = [container._modules.get(name) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers):
        return []
    linears = cast(list[nn.Linear], layers)
    return linears if len({linear.bias is None for linear in linears}) == 1 else []


def put_joint(
    container: nn.Module,
    names: tuple[str, ...],
    multiply: Callable[[Tensor], Tensor],
    sizes: list[int],
) -> None:
    """Let the layers of these names be parts of one that multiplies so."""
    joint = _Joint(multiply, sizes)
    for index, name in enumerate(names):
        setattr(container, name, _Part(joint, index))


class Product:
    """By a weight (N, K), with a bias (N,) if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, values: Tensor) -> Tensor:
        return F.linear(values, self.weight, self.bias)


def joint_product(container: nn.Module, name: str) -> Product | None:
    """The product of a layer's stack; None if the layer is part of none."""
    part = container._modules.get(name)
    multiply = part.joint.multiply if isinstance(part, _Part) else None
    return multiply if isinstance(multiply, Product) else None


class _Joint:
    """The joint product of layers that multiply the same input, computed when the first is asked.

    Each piece is handed out once: after a pass that was broken off, the first layer of the next one
    finds its own gone, and all are computed anew.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor], sizes: list[int]) -> None:
        self.multiply = multiply
        self._sizes = sizes
        self._pieces: list[Tensor | None] = [None] * len(sizes)

    def take(self, values: Tensor, index: int) -> Tensor:
        if self._pieces[index] is None:
            self._pieces = list(self.multiply(values).split(self._sizes, dim=-1))
        piece, self._pieces[index] = self._pieces[index], None
        assert piece is not None, "it has just been computed"
        return piece


class _Part(nn.Module):
    """In the place of one of the layers."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self._index = index

    def forward(self, values: Tensor) -> Tensor:
        return self.joint.take(values, self._index)
