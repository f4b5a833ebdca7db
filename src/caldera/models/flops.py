"""How much arithmetic a model needs, and how much a GPU promises: the two halves of MFU.

A matrix of P parameters costs 2 P floating-point operations a token in the forward pass, 2 P for
the gradient of its input and 2 P for its own. Attention over L tokens costs a layer
4 (heads * head_dim) L^2 forward and twice that backward, and half of both since it is causal; in a
sliding window of W < L tokens, the L^2 / 2 pairs are L W - W^2 / 2. So, with all parameters
trained:

    forward            2 P tokens +  4 layers (heads * head_dim) sum(L^2) / 2
    forward, backward  6 P tokens + 12 layers (heads * head_dim) sum(L^2) / 2

P counts the matrices that tokens are multiplied with: not embeddings, which are looked up, nor
norms. The head counts for the tokens that it is applied to, here those of the responses. A frozen
matrix, as under an adapter, needs no separate gradient: 4 P instead of 6 P. The adapter's
matrices count like all others. What is computed twice to save memory (checkpointed activations,
the chunked head's logits) counts once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from caldera.models.forward import base_module

# Dense bfloat16 (V100: float16), in operations a second, as their makers state them. The first
# whose name is found, as whole words, in that of the device counts.
PROMISED_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}


def promised_flops(device: torch.device) -> float | None:
    """Operations a second of a GPU's data sheet; None for a CPU, or a GPU that is not listed."""
    if device.type != "cuda":
        return None
    return promised_flops_by_name(torch.cuda.get_device_name(device))


def promised_flops_by_name(device_name: str) -> float | None:
    """As above, for the name by which the driver calls a GPU."""
    for name, flops in PROMISED_FLOPS.items():
        if re.search(rf"\b{name}\b", device_name):
            return flops
    return None


@dataclass(frozen=True)
class Arithmetic:
    """The matrices that a model multiplies with each token; counted before they are sharded."""

    backbone: tuple[int, int]
    """Products a token in a forward pass, and in forward and backward."""
    head: tuple[int, int]
    """The same of the head, for a token that it is applied to."""
    config: PreTrainedConfig
    is_known: bool
    """Not so for mixtures of experts, which the formula above does not cover."""

    @classmethod
    def of(cls, module: nn.Module) -> Arithmetic:
        model = base_module(module)
        matrices = [
            parameter
            for layer in model.base_model.modules()
            if not isinstance(layer, nn.Embedding)
            for parameter in layer.parameters(recurse=False)
            if parameter.dim() > 1
        ]
        backbone = [sum(m.numel() * _passes(m, training) for m in matrices) for training in (0, 1)]
        head = model.get_output_embeddings()
        width = model.config.hidden_size
        if head is None:  # a value head: one output, always trained
            of_head = [width, 3 * width]
        else:
            of_head = [head.weight.numel() * _passes(head.weight, training) for training in (0, 1)]
        is_known = all(matrix.dim() == 2 for matrix in matrices)
        return cls((backbone[0], backbone[1]), (of_head[0], of_head[1]), model.config, is_known)

    def flops(self, lengths: Sequence[int], head_tokens: int, training: bool) -> float | None:
        """Operations of a forward pass over sequences of these lengths, or forward and backward."""
        if not self.is_known:
            return None
        products = self.backbone[training] * sum(lengths) + self.head[training] * head_tokens
        attention = 4 * _attended_width(self.config, lengths) * (3 if training else 1)
        return float(2 * products + attention)


def _passes(matrix: nn.Parameter, training: int) -> int:
    """Products with a matrix: forward, and backward that of its input and its own."""
    if not training:
        return 1
    return 3 if matrix.requires_grad else 2


def _attended_width(config: PreTrainedConfig, lengths: Sequence[int]) -> float:
    """Pairs of tokens of which one attends to the other, times heads * head_dim, of all layers."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    every_layer = ["sliding_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or every_layer
    pairs = sum(_pairs(lengths, window if "sliding" in kind else None) for kind in kinds)
    return float(pairs * heads * head_dim)


def _pairs(lengths: Sequence[int], window: int | None) -> float:
    reaches = [length if window is None else min(window, length) for length in lengths]
    return sum(
        length * reach - reach**2 / 2 for length, reach in zip(lengths, reaches, strict=True)
    )
