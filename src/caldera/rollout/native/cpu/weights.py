"""Matrices as the sampler multiplies by them on a CPU."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST_PACKED = 2**17
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


class HeldWeight:
    """One or more matrices of the same width, laid behind each other in a custom layout."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor], scale: Tensor | None = None
    ) -> None:
        self._weights = list(weights)  # (N, K) each
        self._biases = list(biases)  # (N,) each, or none
        self._scale = scale  # (K,) that the values are multiplied by first
        self._is_large = sum(weight.numel() for weight in weights) >= SMALLEST_PACKED
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    @classmethod
    def of(cls, *linears: nn.Linear, scale: Tensor | None = None) -> Self:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls([linear.weight for linear in linears], biases, scale)

    def pack(self) -> None:
        weights = self._weights
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        whole = whole if self._scale is None else whole * self._scale
        self._packed = self._laid_out(whole.detach())
        self._bias = torch.cat(self._biases).detach() if self._biases else None

    def release(self) -> None:
        self._packed = self._bias = None

    def _laid_out(self, whole: Tensor) -> Tensor:
        raise NotImplementedError


class PackedWeight(HeldWeight):
    """Multiplies, by a large matrix in the layout of oneDNN, by a small one as it is."""

    def _laid_out(self, whole: Tensor) -> Tensor:
        if not self._is_large:
            return whole
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole)
        return packed

    def __call__(self, values: Tensor) -> Tensor:
        """values (..., K); returns (..., N)."""
        return self._product(values, "none") if self._is_large else self._plain(values)

    def swished(self, values: Tensor) -> Tensor:
        """values (..., K); returns (..., N), the product times its own sigmoid."""
        if self._is_large:
            return self._product(values, "swish")
        return F.silu(self._plain(values), inplace=True)

    def gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """values (..., K); the product times the gate (..., N)."""
        return self._with(values, gate, "mul") if self._is_large else gate.mul_(self._plain(values))

    def added(self, values: Tensor, others: Tensor) -> Tensor:
        """values (..., K); the product and the others (..., N)."""
        return self._with(values, others, "add") if self._is_large else others + self._plain(values)

    def _plain(self, values: Tensor) -> Tensor:
        assert self._packed is not None, "it is packed before it is used"
        return F.linear(values, self._packed, self._bias)

    def _product(self, values: Tensor, then: str) -> Tensor:
        """After oneDNN's function of the name `then`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._packed, self._bias, then, [], ""
        )
        return product

    def _with(self, values: Tensor, others: Tensor, how: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            values, others, self._packed, self._bias, how
        )
        return product
