"""Matrices in the layout that oneDNN multiplies by."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SMALLEST = 2**17
"""Cells of a matrix for which the call of oneDNN pays."""


def can_pack(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module that computes in this precision can be run with packed weights here."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if {parameter.dtype for parameter in module.parameters()} != {dtype}:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedWeight:
    """Multiplies by one or more matrices of the same width, laid behind each other."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor], scale: Tensor | None = None
    ) -> None:
        self._weights = list(weights)  # (N, K) each
        self._biases = list(biases)  # (N,) each, or none
        self._scale = scale  # (K,) that the values are multiplied by first
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    @classmethod
    def of(cls, *linears: nn.Linear, scale: Tensor | None = None) -> PackedWeight:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls([linear.weight for linear in linears], biases, scale)

    def pack(self) -> None:
        weights = self._weights
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        whole = whole if self._scale is None else whole * self._scale
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole.detach(), None)
        self._bias = torch.cat(self._biases).detach() if self._biases else None

    def release(self) -> None:
        self._packed = self._bias = None

    def __call__(self, values: Tensor, then: str = "none") -> Tensor:
        """values (..., K); returns (..., N), after oneDNN's function of the name `then`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._packed, self._bias, then, [], ""
        )
        return product

    def gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """values (..., K); the product times the gate (..., N)."""
        return self._with(values, gate, "mul")

    def added(self, values: Tensor, others: Tensor) -> Tensor:
        """values (..., K); the product and the others (..., N)."""
        return self._with(values, others, "add")

    def _with(self, values: Tensor, others: Tensor, how: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            values, others, self._packed, self._bias, how
        )
        return product
