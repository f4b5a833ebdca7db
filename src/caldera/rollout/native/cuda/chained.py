"""Decode steps on Hopper GPUs: layers of the commonest shape as chains of kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F

from caldera.models.exact_norm import epsilon_of
from caldera.models.forward import base_module
from caldera.rollout.native.blocks import PAGE_SIZE
from caldera.rollout.native.cuda.attention_kernels import Pages, Turn, attend_pages
from caldera.rollout.native.cuda.chained_kernels import (
    begin_kernel,
    gate_kernel,
    parts_kernel,
    product_kernel,
    settle_kernel,
    tile_kernel,
)
from caldera.rollout.native.cuda.divisions import (
    DOWN,
    INWARD,
    OUTWARD,
    SLABS,
    STRIPS,
    Strip,
    Tiles,
)
from caldera.rollout.native.cuda.graphs import FIELDS, INPUTS, DeviceState
from caldera.rollout.native.cuda.launch import CHAINED, CHAINED_LATE, UNCHAINED
from caldera.rollout.native.layers import has_known_layers, joint_product, norms_of, window_of

# ---- Which decoder layers are known to chains of kernels, and the weights that those read

HEAD_WIDTHS = (64, 128)
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Whose angle at a position is always the same."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights that the kernels read, which are the twin's."""

    inward: Tensor  # ((Hq + 2 Hkv) D, H)
    bias: Tensor | None
    outward: Tensor  # (H, Hq D)
    gates: Tensor  # (2 I, H)
    down: Tensor  # (H, I)
    before: Tensor  # (H,) the norms' weights
    between: Tensor
    head_norms: tuple[Tensor, Tensor] | tuple[None, None]  # (D,) of queries and keys
    epsilon: float  # of all norms
    scale: float  # of scores

    @property
    def numbers(self) -> tuple[object, ...]:
        """What is the same in all layers."""
        matrices = (self.inward, self.outward, self.gates, self.down)
        return self.epsilon, self.scale, *(matrix.shape for matrix in matrices)


def known_layers(module: nn.Module) -> list[LayerWeights] | None:
    """Those of the twin's module, if all are known, and alike."""
    trunk = cast(Any, base_module(module).base_model)
    if not has_known_layers(module) or trunk.rotary_emb.rope_type not in ROTATIONS:
        return None
    epsilon = epsilon_of(trunk.norm)
    layers = [_weights(layer, epsilon) for layer in trunk.layers]
    known = [layer for layer in layers if layer is not None]
    is_alike = len({layer.numbers for layer in known}) == 1
    return known if len(known) == len(layers) and is_alike else None


def _weights(layer: Any, epsilon: float) -> LayerWeights | None:
    """None if the layer cannot be chained. `epsilon`: of the last norm."""
    attention, mlp, norms = layer.self_attn, layer.mlp, norms_of(layer)
    inward, gates = joint_product(attention, "q_proj"), joint_product(mlp, "gate_proj")
    if inward is None or gates is None or gates.bias is not None or window_of(layer) is not None:
        return None
    others = (attention.o_proj, mlp.down_proj)
    width, inner = gates.weight.shape[1], gates.weight.shape[0] // 2
    fits = (
        all(type(each) is nn.Linear and each.bias is None for each in others)
        and all(epsilon_of(norm) == epsilon for norm in norms)
        and attention.head_dim in HEAD_WIDTHS
        and width % 16 == 0
        and inner % 16 == 0
    )
    if not fits:
        return None
    outward, down = (each.weight for each in others)
    before, between, *heads = (cast(Tensor, norm.weight) for norm in norms)
    return LayerWeights(
        inward.weight,
        inward.bias,
        outward,
        gates.weight,
        down,
        before,
        between,
        (heads[0], heads[1]) if heads else (None, None),
        epsilon,
        attention.scaling,
    )


WIDEST, DEEPEST = 1024, 8192
"""Hidden and inner size up to which products of our own are faster than cuBLAS's."""
MOST_ROWS = 64
"""Sequences up to which programs have all of them, and their tile of weights before they wait."""
GATES_AT_ONCE = 1024
"""That a program multiplies by each other."""
HOPPER = 9
MOST_IN_TILES = 512
"""Sequences up to which tiles are no slower than cuBLAS's products."""


def can_chain(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels may be begun early, and tiles of weights fit into what a program has."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and torch.cuda.get_device_capability(device)[0] == HOPPER


def chained_steps(module: nn.Module, state: DeviceState) -> ChainedSteps | None:
    """Steps of the twin's module, if all its layers are of a shape that is known here."""
    layers = known_layers(module)
    steps = None if layers is None else ChainedSteps(module, layers, state)
    if steps is None or steps.angles[0].shape[1] != steps.head_width:
        return None
    return steps


class ChainedSteps:
    """From a letter, whose inputs (5, B) are laid where the step is told to, to normed hidden
    states, (B, H)."""

    def __init__(self, module: nn.Module, layers: list[LayerWeights], state: DeviceState) -> None:
        trunk = cast(Any, base_module(module).base_model)
        self.layers = layers
        self.state = state
        self.embedding: Tensor = trunk.embed_tokens.weight
        self.last_norm: Tensor = trunk.norm.weight
        self.epsilon, self.scale = layers[0].epsilon, layers[0].scale
        self.head_width: int = trunk.layers[0].self_attn.head_dim
        heads = len(layers[0].inward) // self.head_width
        queries = layers[0].outward.shape[1] // self.head_width
        self.head_counts = [queries, *[(heads - queries) // 2] * 2]  # queries, keys, values
        self.is_small = layers[0].gates.shape[1] <= WIDEST and layers[0].down.shape[1] <= DEEPEST
        self.angles = _angles(trunk.rotary_emb, self.embedding, state)

    def __call__(self, inputs: Tensor) -> Tensor:
        norms = [layer.before for layer in self.layers[1:]] + [self.last_norm]
        step = self._kind(inputs.shape[1])(self, inputs)
        for number, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            found = step.attend(step.heads(layer), layer, number)
            step.settle(step.outward(found, layer), layer.between)
            step.settle(step.down(step.gated(layer), layer), norm)
        return step.normed

    def _kind(self, size: int) -> type[_Step]:
        if not self.is_small or size > MOST_IN_TILES:
            return _ManyRows
        return _FewRows if size <= MOST_ROWS else _SomeRows


def begin_warps(width: int) -> int:
    """How many the kernel that begins a step has: few, for each of them reads the letter."""
    return max(1, min(width // 1024, 8))


def _angles(rotary: nn.Module, like: Tensor, state: DeviceState) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, (positions, D) each."""
    longest = state.tables.shape[1] * PAGE_SIZE
    positions = torch.arange(longest, device=like.device)[None]
    cosine, sine = rotary(like[:1, None], positions)
    return cosine[0].contiguous(), sine[0].contiguous()


class _Step(ABC):
    """The tensors of a step that all layers share, and the kernels that fill them."""

    preloads: ClassVar[bool]
    """Whether attention reads its first keys before it waits."""
    settles: ClassVar[Mapping[str, int]] = CHAINED
    """How sums and norms are launched."""

    def __init__(self, steps: ChainedSteps, inputs: Tensor) -> None:
        self._steps = steps
        self._inputs = inputs
        self._size = size = inputs.shape[1]
        self._chain = UNCHAINED  # until the second kernel has been launched
        width = steps.embedding.shape[1]
        self._hidden = steps.embedding.new_empty(size, width)
        self.normed = torch.empty_like(self._hidden)
        mail, tables = steps.state.mail, steps.state.tables
        padded = triton.next_power_of_2(width)
        begin_kernel[(size,)](
            mail.letters,
            mail.next_letter,
            inputs,
            steps.state.newest,
            tables,
            steps.embedding,
            steps.layers[0].before,
            self._hidden,
            self.normed,
            size,
            mail.letters.stride(0),
            tables.stride(0),
            steps.epsilon,
            WIDTH=width,
            WIDTH_PADDED=padded,
            PAGE=PAGE_SIZE,
            FIELDS=FIELDS,
            INPUTS=INPUTS,
            num_warps=begin_warps(padded),
            enable_fp_fusion=True,
        )

    def heads(self, layer: LayerWeights) -> Tensor:
        """Queries, keys and values, (B, Hq + 2 Hkv, D)."""
        found = self._inward(layer)
        if self._hidden.is_cuda:
            self._chain = CHAINED
        return found.view(self._size, -1, self._steps.head_width)

    def attend(self, heads: Tensor, layer: LayerWeights, number: int) -> Tensor:
        steps = self._steps
        pages = Pages(steps.state.pointers[number], self._inputs, steps.state.tables)
        (cosine, sine), (query_norm, key_norm) = steps.angles, layer.head_norms
        turn = Turn(cosine, sine, query_norm, key_norm, steps.epsilon)
        query, key, value = heads.split_with_sizes(steps.head_counts, 1)
        found = attend_pages(
            query,
            key,
            value,
            pages,
            steps.scale,
            turn=turn,
            preload=self.preloads,
            chain=self._chain,
        )
        return found.view(self._size, -1)

    @abstractmethod
    def _inward(self, layer: LayerWeights) -> Tensor:
        """From the normed states to heads, (B, (Hq + 2 Hkv) D)."""

    @abstractmethod
    def outward(self, found: Tensor, layer: LayerWeights) -> Tensor:
        """What is to be added to the hidden states, in parts, (P, B, H)."""

    @abstractmethod
    def gated(self, layer: LayerWeights) -> Tensor:
        """From the normed states to what goes into the last product, (B, I)."""

    @abstractmethod
    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        """What is to be added to the hidden states, in parts, (P, B, H)."""

    def settle(self, parts: Tensor, scale: Tensor) -> None:
        """Add the parts (P, B, H) to the hidden states, and norm them."""
        size, width = self._hidden.shape
        settle_kernel[(size,)](
            parts,
            self._hidden,
            scale,
            self.normed,
            size,
            self._steps.epsilon,
            WIDTH=width,
            WIDTH_PADDED=triton.next_power_of_2(width),
            PARTS=len(parts),
            PARTS_PADDED=triton.next_power_of_2(len(parts)),
            num_warps=8,
            **(self.settles if self._hidden.is_cuda else UNCHAINED),
        )


class _ManyRows(_Step):
    """Products by cuBLAS, which knows no chains: what stands beside them is begun early."""

    preloads = False

    def _inward(self, layer: LayerWeights) -> Tensor:
        return F.linear(self.normed, layer.inward, layer.bias)

    def outward(self, found: Tensor, layer: LayerWeights) -> Tensor:
        return F.linear(found, layer.outward)[None]

    def gated(self, layer: LayerWeights) -> Tensor:
        both = F.linear(self.normed, layer.gates)
        width = both.shape[1] // 2
        out = both.new_empty(self._size, width)
        gate_kernel[(self._size, triton.cdiv(width, GATES_AT_ONCE))](
            both, out, width, BLOCK=GATES_AT_ONCE, num_warps=4, **self._chain
        )
        return out

    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        return F.linear(gated, layer.down)[None]


class _SomeRows(_ManyRows):
    """Products of our own, in tiles, but for the largest, where cuBLAS is faster."""

    settles = CHAINED_LATE

    def _inward(self, layer: LayerWeights) -> Tensor:
        return self._product(self.normed, layer.inward, INWARD, layer.bias)[0]

    def outward(self, found: Tensor, layer: LayerWeights) -> Tensor:
        return self._product(found, layer.outward, OUTWARD)

    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        return self._product(gated, layer.down, DOWN)

    def _product(
        self, values: Tensor, weight: Tensor, tiles: list[Tiles], bias: Tensor | None = None
    ) -> Tensor:
        """values (B, K) by weight (N, K), as the sum of what is returned, (P, B, N)."""
        tile = next(tile for tile in tiles if self._size <= tile.most)
        width, cells = weight.shape
        span = triton.cdiv(triton.cdiv(cells, tile.depth), tile.parts) * tile.depth
        parts = triton.cdiv(cells, span)
        dtype = torch.float32 if tile.parts > 1 else values.dtype
        out = values.new_empty(parts, self._size, width, dtype=dtype)
        grid = triton.cdiv(width, tile.columns), triton.cdiv(self._size, tile.rows), parts
        tile_kernel[grid](
            values,
            weight,
            bias,
            out,
            self._size,
            width,
            span,
            K=cells,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            BIASED=bias is not None,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **self._chain,
        )
        return out


class _FewRows(_Step):
    """Products of our own, whose programs hold their tile of weights before they wait.

    A program has all sequences, which are the narrow side of its product: too narrow for tiles.
    """

    preloads = True

    def __init__(self, steps: ChainedSteps, inputs: Tensor) -> None:
        super().__init__(steps, inputs)
        self._rows = max(8, triton.next_power_of_2(self._size))
        self._strips = next(strips for strips in STRIPS if self._size <= strips.most)

    def _inward(self, layer: LayerWeights) -> Tensor:
        return self._product(layer.inward, layer.bias, len(layer.inward), self._strips.inward)

    def outward(self, found: Tensor, layer: LayerWeights) -> Tensor:
        return self._in_parts(found, layer.outward, self._strips.outward)

    def gated(self, layer: LayerWeights) -> Tensor:
        return self._product(layer.gates, None, layer.down.shape[1], self._strips.gates, True)

    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        return self._in_parts(gated, layer.down, self._strips.down)

    def _product(
        self, weight: Tensor, bias: Tensor | None, width: int, strip: Strip, gated: bool = False
    ) -> Tensor:
        """The normed states by a weight, (B, width)."""
        whole = 2 * SLABS * strip.depth  # what a program without a loop has
        assert strip.stages or weight.shape[1] <= whole, (strip, weight.shape)
        out = weight.new_empty(self._size, width)
        product_kernel[(triton.cdiv(len(weight), strip.columns),)](
            self.normed,
            weight,
            bias,
            out,
            self._size,
            width,
            K=weight.shape[1],
            COLUMNS=strip.columns,
            ROWS=self._rows,
            DEPTH=strip.depth,
            SLABS=0 if strip.stages else SLABS,
            GATED=gated,
            BIASED=bias is not None,
            STAGES=strip.stages,
            num_warps=strip.warps,
            **self._chain,
        )
        return out

    def _in_parts(self, values: Tensor, weight: Tensor, strip: Strip) -> Tensor:
        """values (B, K) by weight (N, K), as the sum of what is returned, (P, B, N)."""
        width, cells = weight.shape
        count = triton.cdiv(cells, strip.depth)
        parts = torch.empty(count, self._size, width, device=values.device)
        parts_kernel[(triton.cdiv(width, strip.columns), count)](
            values,
            weight,
            parts,
            self._size,
            width,
            K=cells,
            COLUMNS=strip.columns,
            ROWS=self._rows,
            DEPTH=strip.depth,
            num_warps=strip.warps,
            **self._chain,
        )
        return parts
