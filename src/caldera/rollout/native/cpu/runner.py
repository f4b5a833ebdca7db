"""The module as the sampler runs it on a CPU: its weights in the layout that oneDNN multiplies by.

PyTorch's own products of a few rows by a large matrix take up to four times as long, above all on
processors that are not Intel's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.exact_norm import epsilon_of
from caldera.models.forward import base_module, language_head
from caldera.rollout.native.backbone import copied_structure, plain_backbone
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.kernels import TILE, CpuKernels, Matrices, cpu_kernels, why_not
from caldera.rollout.native.cpu.weights import SMALLEST_PACKED, HeldWeight, PackedWeight
from caldera.rollout.native.layers import STACKS, LayerParts, has_known_layers, put_joint, stackable
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.steps import Step

# ---- Fused forward: models of the commonest shape, run in a few operations a layer
#
# transformers writes a layer as some forty small operations, each of which costs more than what it
# computes where a few tokens are decoded.

# ---- Layers whose matrices are so small that calls cost more than their work: one call a layer


class TiledWeight(HeldWeight):
    """For the kernels: (N, K) as (N / TILE, K, TILE)."""

    def _laid_out(self, whole: Tensor) -> Tensor:
        return whole.view(-1, TILE, whole.shape[1]).transpose(1, 2).contiguous()

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of the matrix, and of the bias if there is one."""
        assert self._packed is not None, "it is packed before it is used"
        return self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()


class SmallLayer:
    """The forward pass of a decoder layer."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        first, second = parts.scales
        self._qkv_proj = TiledWeight.of(*parts.qkv_proj, scale=first)
        self._others = [
            TiledWeight.of(parts.o_proj),
            TiledWeight.of(parts.gate, scale=second),
            TiledWeight.of(parts.up, scale=second),
            TiledWeight.of(parts.down),
        ]
        self._width = sum(linear.out_features for linear in parts.qkv_proj)
        self._sizes = parts.down.out_features, parts.down.in_features
        self.packs = [self._qkv_proj, *self._others]

    @staticmethod
    def fits(parts: LayerParts) -> bool:
        others = (parts.o_proj, parts.gate, parts.up, parts.down)
        joint = sum(linear.out_features for linear in parts.qkv_proj)
        widths = [joint, *(linear.out_features for linear in others)]
        return (
            all(width % TILE == 0 for width in widths)
            and all(linear.bias is None for linear in others)
            and max(joint, parts.gate.out_features) * parts.gate.in_features < SMALLEST_PACKED
        )

    def __call__(
        self, values: Tensor, turn: tuple[Tensor, Tensor], attention: CompiledAttention
    ) -> Tensor:
        """values (T, H), which are changed."""
        parts = self._parts
        matrices = Matrices(
            *self._qkv_proj.addresses,
            *(weight.addresses[0] for weight in self._others),
            *self._sizes,
            *parts.epsilons,
            values.data_ptr(),
        )
        heads = parts.heads(values.new_empty(len(values), self._width))
        attention.run_layer(parts.attention, heads, turn, matrices)
        return values


def can_fuse(module: nn.Module) -> bool:
    """Whether a model is of a shape that is known here: with adapters it is not, say."""
    if not has_known_layers(module):
        return False
    backbone = cast(Any, base_module(module).base_model)
    is_complete = len(backbone.layers) == backbone.config.num_hidden_layers
    return is_complete and all(_has_plain_matrices(layer) for layer in backbone.layers)


def _has_plain_matrices(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    qkv_proj = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*qkv_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len({linear.bias is None for linear in qkv_proj}) == 1
        and mlp.gate_proj.weight.dtype == torch.float32  # norms become part of the weights
    )


class FusedBackbone:
    """From tokens to hidden states."""

    def __init__(self, module: nn.Module, kernels: CpuKernels) -> None:
        backbone = cast(Any, base_module(module).base_model)
        self._kernels = kernels
        self._embed, self._angles, self._norm = (
            backbone.embed_tokens,
            backbone.rotary_emb,
            backbone.norm,
        )
        parts = [LayerParts(layer) for layer in backbone.layers]
        self._layers: list[FusedLayer | SmallLayer] = [
            SmallLayer(each) if SmallLayer.fits(each) else FusedLayer(each, kernels)
            for each in parts
        ]
        self.packs = [pack for layer in self._layers for pack in layer.packs]

    def __call__(self, tokens: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """tokens and positions (1, T); returns (T, H)."""
        assert isinstance(attention, CompiledAttention), "what else there is knows no turns"
        values = self._embed(tokens)
        cos, sin = (angle[0].contiguous() for angle in self._angles(values, positions))  # (T, D)
        values = values[0]
        for layer in self._layers:
            values = layer(values, (cos, sin), attention)
        normed = self._kernels.normalise(values, epsilon_of(self._norm))
        return normed.mul_(self._norm.weight)


class FusedLayer:
    """The forward pass of a decoder layer: five products, and the operations between them."""

    def __init__(self, parts: LayerParts, kernels: CpuKernels) -> None:
        self._parts = parts
        self._kernels = kernels
        first, second = parts.scales
        self._qkv_proj = PackedWeight.of(*parts.qkv_proj, scale=first)
        self._o_proj = PackedWeight.of(parts.o_proj)
        self._gate = PackedWeight.of(parts.gate, scale=second)
        self._up = PackedWeight.of(parts.up, scale=second)
        self._down = PackedWeight.of(parts.down)
        self.packs = [self._qkv_proj, self._o_proj, self._gate, self._up, self._down]

    def __call__(
        self, values: Tensor, turn: tuple[Tensor, Tensor], attention: CompiledAttention
    ) -> Tensor:
        """values (T, H)."""
        parts = self._parts
        heads = parts.heads(self._qkv_proj(self._kernels.normalise(values, parts.epsilons[0])))
        found = attention.turn_and_attend(parts.attention, heads, turn)
        values = self._o_proj.added(found.flatten(1), values)
        normed = self._kernels.normalise(values, parts.epsilons[1])
        return self._down.added(self._up.gated(normed, self._gate.swished(normed)), values)


logger = logging.getLogger(__name__)


# ---- The runner


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
