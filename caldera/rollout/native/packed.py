"""The module as the sampler runs it on a CPU: its weights in the layout that oneDNN multiplies by.

PyTorch's own products of a few rows by a large matrix take up to four times as long, above all on
processors that are not Intel's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.forward import base_module, decoder_layers, language_head
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.lean import LeanLayer, Rotation, is_lean
from caldera.rollout.native.mirror import MOST_BYTES, Mirror, MirroredDecode
from caldera.rollout.native.packed_weights import SMALLEST, PackedWeight
from caldera.rollout.native.runner import Output, Runner
from caldera.rollout.native.sampler import SamplingRows
from caldera.rollout.native.steps import Decode, Prefill
from caldera.rollout.native.trunk import plain_trunk
from caldera.rollout.native.twin import STACKS, put_joint, stackable


class PackedTwin:
    """A copy of the module's structure that multiplies by packed copies of its large matrices.

    All other parameters are the module's own, so that only matrices are to be packed again after
    the weights have changed.
    """

    def __init__(self, module: nn.Module) -> None:
        own = [*module.parameters(), *module.buffers()]
        self._source = module
        self.module = copy.deepcopy(module, {id(each): each for each in own}).eval()
        for layer in decoder_layers(self.module):
            layer.__dict__.pop("forward", None)  # compiled for training, and the module's own
        head = PackedWeight([language_head(self.module)], [])
        self.logits: Callable[[Tensor], Tensor] = head
        self._packs = [head, *self._lean_all(), *self._stack_all(), *self._replace_all()]
        self._known: list[tuple[int, int]] | None = None

    def _lean_all(self) -> list[PackedWeight]:
        rotation, packs = Rotation(), []
        for layer in decoder_layers(self.module):
            if is_lean(layer):
                lean = LeanLayer(layer, rotation)
                layer.forward = lean
                packs += lean.packs
                layer._modules.clear()  # nothing else of it is run
        return packs

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
        known = [(each._version, each.data_ptr()) for each in self._source.parameters()]
        if weights_changed or known != self._known:
            with torch.no_grad():
                for pack in self._packs:
                    pack.pack()
        self._known = known

    def release(self) -> None:
        self._known = None
        for pack in self._packs:
            pack.release()


class PackedRunner(Runner):
    """Steps on a CPU, with packed weights."""

    def __init__(self, module: nn.Module, device: torch.device, rows: int) -> None:
        super().__init__(module, device, rows)
        self._twin = PackedTwin(module)
        self._module = self._twin.module
        self._trunk = plain_trunk(self._module)

        self._mirror: Mirror | None = None

    def prepare(self, weights_changed: bool) -> None:
        self._twin.refresh(weights_changed)

    def rest(self) -> None:
        self._twin.release()
        self._mirror = None

    def _prefill(self, step: Prefill, cache: KVCache, sampling: SamplingRows | None) -> Output:
        self._mirror = None  # others will be decoded next
        return super()._prefill(step, cache, sampling)

    def _attention(self, step: Decode, cache: KVCache) -> AttentionContext:
        if self._mirror is None or not self._mirror.take(step):
            self._mirror = None  # before the next one needs the memory
            self._mirror = Mirror(step)
        if self._mirror.tokens() * cache.token_bytes > MOST_BYTES:
            return super()._attention(step, cache)
        return MirroredDecode(self._mirror, cache, step.slots)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._twin.logits(hidden).float()
