"""What a decoder layer of the commonest shape consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model

from caldera.models.exact_norm import epsilon_of

LAYERS = (LlamaDecoderLayer, Qwen2DecoderLayer, MistralDecoderLayer)
"""Whose queries and keys are rotated as they come, by halves. A class of the same name that
came with a model may compute something else."""
LAYERS_WITH_HEAD_NORMS = (Qwen3DecoderLayer,)
"""The same, but each head of queries and keys has its norm first."""
TRUNKS = (LlamaModel, Qwen2Model, Qwen3Model, MistralModel)
"""Which do nothing between embedding, such layers and the last norm."""


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
        norms = (parts.input_layernorm, parts.post_attention_layernorm)
        self.epsilons = [epsilon_of(norm) for norm in norms]
        self.scales: list[Tensor] = [norm.weight for norm in norms]
        self.inward: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.outward: nn.Linear = attention.o_proj
        self.gate: nn.Linear = mlp.gate_proj
        self.up: nn.Linear = mlp.up_proj
        self.down: nn.Linear = mlp.down_proj
        self._head_dim = attention.head_dim
        self._sizes = [linear.out_features // self._head_dim for linear in self.inward]
        is_mistral = type(layer).__name__.startswith("Mistral")
        holder = attention.config if is_mistral else attention
        window: int | None = getattr(holder, "sliding_window", None)
        head_norms = None
        if isinstance(layer, LAYERS_WITH_HEAD_NORMS):
            query, key = attention.q_norm, attention.k_norm
            head_norms = HeadNorms(query.weight, key.weight, epsilon_of(query))
        self.attention = AttentionParts(attention.layer_idx, attention.scaling, window, head_norms)

    def heads(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (T, H, D) of what lies behind each other, (T, N)."""
        heads = joint.view(len(joint), -1, self._head_dim).split_with_sizes(self._sizes, 1)
        return cast(tuple[Tensor, Tensor, Tensor], heads)
