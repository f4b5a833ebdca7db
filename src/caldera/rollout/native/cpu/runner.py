"""The module as the sampler runs it on a CPU: its weights in the layout that oneDNN multiplies by.

PyTorch's own products of a few rows by a large matrix take up to four times as long, above all on
processors that are not Intel's.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caldera.models.attention import AttentionContext
from caldera.models.forward import base_module, language_head
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.kernels import cpu_kernels, why_not
from caldera.rollout.native.cpu.lean import LeanTrunk, is_lean
from caldera.rollout.native.layers import STACKS, put_joint, stackable
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.steps import Step
from caldera.rollout.native.trunk import copied_structure, plain_trunk

logger = logging.getLogger(__name__)


# ---- Matrices as the sampler multiplies by them on a CPU

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
    """One or more matrices of the same width, laid behind each other in a layout of its own."""

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


class PackedRunner(Runner):
    """Steps of a copy of the module's structure, which multiplies by packed copies of its large
    matrices; with compiled kernels, if there can be.

    All other parameters are the module's own, so that only matrices are to be packed again after
    the weights have changed.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, rows: int, shape: CacheShape
    ) -> None:
        super().__init__(module, device, rows)
        reason = why_not(shape.dtype, shape.head_dim)
        if reason is not None:
            logger.info("sampling without compiled kernels: %s", reason)
        self._kernels = cpu_kernels(shape.head_dim) if reason is None else None
        own = [*module.parameters(), *module.buffers()]
        self._module = copied_structure(module, {id(each): each for each in own})
        self._head = PackedWeight([language_head(self._module)], [])
        packs: Sequence[HeldWeight]
        if self._kernels is not None and is_lean(self._module):
            self._trunk = lean = LeanTrunk(self._module, self._kernels)
            packs = lean.packs
        else:
            self._trunk = plain_trunk(self._module)
            packs = [*_stack_all(self._module), *_replace_all(self._module)]
        self._packs = [self._head, *packs]
        self._is_packed = False

    def prepare(self, weights_changed: bool) -> bool:
        changed = super().prepare(weights_changed)
        if changed or not self._is_packed:
            with torch.no_grad():
                for pack in self._packs:
                    pack.pack()
        self._is_packed = True
        return changed

    def rest(self) -> None:
        self._is_packed = False
        for pack in self._packs:
            pack.release()

    def _attention(self, step: Step, cache: KVCache) -> AttentionContext:
        if self._kernels is None:
            return super()._attention(step, cache)
        return CompiledAttention(self._kernels, cache, step)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()


def _stack_all(module: nn.Module) -> list[PackedWeight]:
    packs = []
    for container in list(module.modules()):
        for names in STACKS:
            linears = stackable(container, names)
            if sum(linear.weight.numel() for linear in linears) < SMALLEST_PACKED:
                continue
            pack = PackedWeight.of(*linears)
            put_joint(container, names, pack, [linear.out_features for linear in linears])
            packs.append(pack)
    return packs


def _replace_all(module: nn.Module) -> list[PackedWeight]:
    head, packs = base_module(module).get_output_embeddings(), []
    for part in module.modules():
        if part is not head and type(part) is nn.Linear and part.weight.numel() >= SMALLEST_PACKED:
            pack = PackedWeight.of(part)
            part.forward = pack  # type: ignore[method-assign,assignment]
            packs.append(pack)
    return packs
