"""The module as the sampler runs it on a CPU: its weights in the layout that oneDNN multiplies by.

PyTorch's own products of a few rows by a large matrix take up to four times as long, above all on
processors that are not Intel's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.forward import base_module, language_head
from caldera.rollout.native.backbone import copied_structure, plain_backbone
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.fused_forward import FusedBackbone, can_fuse
from caldera.rollout.native.cpu.kernels import cpu_kernels, why_not
from caldera.rollout.native.cpu.weights import SMALLEST_PACKED, HeldWeight, PackedWeight
from caldera.rollout.native.layers import STACKS, put_joint, stackable
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.steps import Step

logger = logging.getLogger(__name__)


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
        if self._kernels is not None and can_fuse(self._module):
            self._backbone = fused = FusedBackbone(self._module, self._kernels)
            packs = fused.packs
        else:
            self._backbone = plain_backbone(self._module)
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
