"""The module as the sampler runs it on a CPU: its weights in the layout that oneDNN multiplies by.

PyTorch's own products of a few rows by a large matrix take up to four times as long, above all on
processors that are not Intel's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.forward import base_module, decoder_layers, language_head
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.kernels import CpuKernels, cpu_kernels, why_not
from caldera.rollout.native.cpu.lean import LeanTrunk, is_lean
from caldera.rollout.native.cpu.weights import SMALLEST, PackedWeight
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.stacks import STACKS, forget_pieces, put_joint, stackable
from caldera.rollout.native.steps import Step
from caldera.rollout.native.trunk import plain_trunk

logger = logging.getLogger(__name__)


class PackedTwin:
    """A copy of the module's structure that multiplies by packed copies of its large matrices.

    All other parameters are the module's own, so that only matrices are to be packed again after
    the weights have changed.
    """

    def __init__(self, module: nn.Module, kernels: CpuKernels | None) -> None:
        own = [*module.parameters(), *module.buffers()]
        self.module = copy.deepcopy(module, {id(each): each for each in own}).eval()
        for layer in decoder_layers(self.module):
            layer.__dict__.pop("forward", None)  # compiled for training, and the module's own
        head = PackedWeight([language_head(self.module)], [])
        self.logits: Callable[[Tensor], Tensor] = head
        self.lean: LeanTrunk | None = None
        if kernels is not None and is_lean(self.module):
            self.lean = LeanTrunk(self.module, kernels)
            self._packs = [head, *self.lean.packs]
        else:
            self._packs = [head, *self._stack_all(), *self._replace_all()]
        self._is_packed = False

    def _stack_all(self) -> list[PackedWeight]:
        packs = []
        for container in list(self.module.modules()):
            for names in STACKS:
                linears = stackable(container, names)
                if sum(linear.weight.numel() for linear in linears) < SMALLEST:
                    continue
                pack = PackedWeight.of(*linears)
                put_joint(container, names, pack, [linear.out_features for linear in linears])
                packs.append(pack)
        return packs

    def _replace_all(self) -> list[PackedWeight]:
        head, packs = base_module(self.module).get_output_embeddings(), []
        for part in self.module.modules():
            if part is not head and type(part) is nn.Linear and part.weight.numel() >= SMALLEST:
                pack = PackedWeight.of(part)
                part.forward = pack  # type: ignore[method-assign,assignment]
                packs.append(pack)
        return packs

    def refresh(self, weights_changed: bool) -> None:
        """Pack the weights, unless that was done since they changed."""
        forget_pieces(self.module)
        if weights_changed or not self._is_packed:
            with torch.no_grad():
                for pack in self._packs:
                    pack.pack()
        self._is_packed = True

    def release(self) -> None:
        self._is_packed = False
        for pack in self._packs:
            pack.release()


class PackedRunner(Runner):
    """Steps on a CPU, with packed weights, and with compiled kernels if there can be."""

    def __init__(
        self, module: nn.Module, device: torch.device, rows: int, shape: CacheShape
    ) -> None:
        super().__init__(module, device, rows)
        reason = why_not(shape.dtype, shape.head_dim)
        if reason is not None:
            logger.info("sampling without compiled kernels: %s", reason)
        self._kernels = cpu_kernels(shape.head_dim) if reason is None else None
        self._twin = PackedTwin(module, self._kernels)
        self._module = self._twin.module
        self._trunk = plain_trunk(self._module)

    def prepare(self) -> bool:
        changed = super().prepare()
        self._twin.refresh(changed)
        return changed

    def rest(self) -> None:
        self._twin.release()

    def _hidden(self, step: Step, cache: KVCache) -> Tensor:
        if self._kernels is None or self._twin.lean is None:
            return super()._hidden(step, cache)
        positions = torch.from_numpy(step.positions)[None]
        attention = CompiledAttention(self._kernels, cache, step)
        return self._twin.lean(self._tokens(step), positions, attention)

    def _attention(self, step: Step, cache: KVCache) -> AttentionContext:
        if self._kernels is None:
            return super()._attention(step, cache)
        return CompiledAttention(self._kernels, cache, step)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._twin.logits(hidden).float()
