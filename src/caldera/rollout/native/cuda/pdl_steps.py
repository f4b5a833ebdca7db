"""Decode steps on Hopper GPUs: layers of the commonest shape, by programmatic dependent launch."""

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
from caldera.rollout.native.cuda.graphs import FIELDS, INPUTS, DeviceState
from caldera.rollout.native.cuda.launch import NO_PDL, PDL, PDL_LATE
from caldera.rollout.native.cuda.pdl_kernels import (
    add_norm_kernel,
    begin_kernel,
    gate_kernel,
    product_kernel,
    split_k_kernel,
    tile_kernel,
)
from caldera.rollout.native.cuda.tile_config import (
    DOWN_TILES,
    LAYER_TILES,
    O_TILES,
    QKV_TILES,
    SLABS,
    SplitKTiles,
    WeightTile,
)
from caldera.rollout.native.layers import has_known_layers, joint_product, norms_of, window_of

# ---- Which decoder layers the kernels know, and the weights that they read

HEAD_WIDTHS = (64, 128)
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Whose angle at a position is always the same."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights that the kernels read: those of the fused module."""

    qkv_proj: Tensor  # ((Hq + 2 Hkv) D, H)
    bias: Tensor | None
    o_proj: Tensor  # (H, Hq D)
    gate_up_proj: Tensor  # (2 I, H)
    down_proj: Tensor  # (H, I)
    input_norm: Tensor  # (H,) the norms' weights
    post_attention_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | tuple[None, None]  # (D,) of queries and keys
    epsilon: float  # of all norms
    scale: float  # of scores

    @property
    def numbers(self) -> tuple[object, ...]:
        """The numbers that all layers share."""
        matrices = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return self.epsilon, self.scale, *(matrix.shape for matrix in matrices)


def known_layers(module: nn.Module) -> list[LayerWeights] | None:
    """Those of a fused module, if all are known, and alike."""
    backbone = cast(Any, base_module(module).base_model)
    if not has_known_layers(module) or backbone.rotary_emb.rope_type not in ROTATIONS:
        return None
    epsilon = epsilon_of(backbone.norm)
    layers = [_weights(layer, epsilon) for layer in backbone.layers]
    known = [layer for layer in layers if layer is not None]
    is_alike = len({layer.numbers for layer in known}) == 1
    return known if len(known) == len(layers) and is_alike else None


def _weights(layer: Any, epsilon: float) -> LayerWeights | None:
    """None if the layer cannot be pdl_steps. `epsilon`: of the last norm."""
    attention, mlp, norms = layer.self_attn, layer.mlp, norms_of(layer)
    qkv_proj, gates = joint_product(attention, "q_proj"), joint_product(mlp, "gate_proj")
    if qkv_proj is None or gates is None or gates.bias is not None or window_of(layer) is not None:
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
    o_proj, down = (each.weight for each in others)
    input_norm, post_attention_norm, *heads = (cast(Tensor, norm.weight) for norm in norms)
    return LayerWeights(
        qkv_proj.weight,
        qkv_proj.bias,
        o_proj,
        gates.weight,
        down,
        input_norm,
        post_attention_norm,
        (heads[0], heads[1]) if heads else (None, None),
        epsilon,
        attention.scaling,
    )


WIDEST, DEEPEST = 1024, 8192
"""Hidden and inner size up to which Caldera's own products are faster than cuBLAS's."""
MOST_ROWS = 64
"""Sequences up to which programs have all of them, and their tile of weights before they wait."""
GATES_AT_ONCE = 1024
"""That a program multiplies by each other."""
HOPPER = 9
MOST_IN_TILES = 512
"""Sequences up to which tiles are no slower than cuBLAS's products."""


def supports_pdl(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the GPU has programmatic dependent launch, and tiles fit into what a program has."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and torch.cuda.get_device_capability(device)[0] == HOPPER


def make_pdl_steps(module: nn.Module, state: DeviceState) -> PdlSteps | None:
    """Steps of a fused module, if all its layers are of a shape that is known here."""
    layers = known_layers(module)
    steps = None if layers is None else PdlSteps(module, layers, state)
    if steps is None or steps.angles[0].shape[1] != steps.head_width:
        return None
    return steps


class PdlSteps:
    """From a message, whose inputs (5, B) are copied to the given tensor, to normed hidden states,
    (B, H)."""

    def __init__(self, module: nn.Module, layers: list[LayerWeights], state: DeviceState) -> None:
        backbone = cast(Any, base_module(module).base_model)
        self.layers = layers
        self.state = state
        self.embedding: Tensor = backbone.embed_tokens.weight
        self.last_norm: Tensor = backbone.norm.weight
        self.epsilon, self.scale = layers[0].epsilon, layers[0].scale
        self.head_width: int = backbone.layers[0].self_attn.head_dim
        heads = len(layers[0].qkv_proj) // self.head_width
        queries = layers[0].o_proj.shape[1] // self.head_width
        self.head_counts = [queries, *[(heads - queries) // 2] * 2]  # queries, keys, values
        self.is_small = (
            layers[0].gate_up_proj.shape[1] <= WIDEST and layers[0].down_proj.shape[1] <= DEEPEST
        )
        self.angles = _angles(backbone.rotary_emb, self.embedding, state)

    def __call__(self, inputs: Tensor) -> Tensor:
        norms = [layer.input_norm for layer in self.layers[1:]] + [self.last_norm]
        step = self._kind(inputs.shape[1])(self, inputs)
        for number, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            found = step.attend(step.heads(layer), layer, number)
            step.add_norm(step.o_proj(found, layer), layer.post_attention_norm)
            step.add_norm(step.down(step.gated(layer), layer), norm)
        return step.normed

    def _kind(self, size: int) -> type[_Step]:
        if not self.is_small or size > MOST_IN_TILES:
            return _ManyRows
        return _FewRows if size <= MOST_ROWS else _SomeRows


def begin_warps(width: int) -> int:
    """How many the first kernel of a step has: few, for each of them reads the message."""
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
    add_norm_launch: ClassVar[Mapping[str, int]] = PDL
    """How sums and norms are launched."""

    def __init__(self, steps: PdlSteps, inputs: Tensor) -> None:
        self._steps = steps
        self._inputs = inputs
        self._size = size = inputs.shape[1]
        self._launch = NO_PDL  # until the second kernel has been launched
        width = steps.embedding.shape[1]
        self._hidden = steps.embedding.new_empty(size, width)
        self.normed = torch.empty_like(self._hidden)
        mailbox, tables = steps.state.mailbox, steps.state.tables
        padded = triton.next_power_of_2(width)
        begin_kernel[(size,)](
            mailbox.messages,
            mailbox.next_message,
            inputs,
            steps.state.newest,
            tables,
            steps.embedding,
            steps.layers[0].input_norm,
            self._hidden,
            self.normed,
            size,
            mailbox.messages.stride(0),
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
        found = self._qkv_proj(layer)
        if self._hidden.is_cuda:
            self._launch = PDL
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
            launch=self._launch,
        )
        return found.view(self._size, -1)

    @abstractmethod
    def _qkv_proj(self, layer: LayerWeights) -> Tensor:
        """From the normed states to heads, (B, (Hq + 2 Hkv) D)."""

    @abstractmethod
    def o_proj(self, found: Tensor, layer: LayerWeights) -> Tensor:
        """The addend of the hidden states as split-K partial sums, (P, B, H)."""

    @abstractmethod
    def gated(self, layer: LayerWeights) -> Tensor:
        """From the normed states to what goes into the last product, (B, I)."""

    @abstractmethod
    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        """The addend of the hidden states as split-K partial sums, (P, B, H)."""

    def add_norm(self, parts: Tensor, scale: Tensor) -> None:
        """Add the partial sums (P, B, H) to the hidden states, and norm them."""
        size, width = self._hidden.shape
        add_norm_kernel[(size,)](
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
            **(self.add_norm_launch if self._hidden.is_cuda else NO_PDL),
        )


class _ManyRows(_Step):
    """Products by cuBLAS, which has no PDL: the kernels beside them have it."""

    preloads = False

    def _qkv_proj(self, layer: LayerWeights) -> Tensor:
        return F.linear(self.normed, layer.qkv_proj, layer.bias)

    def o_proj(self, found: Tensor, layer: LayerWeights) -> Tensor:
        return F.linear(found, layer.o_proj)[None]

    def gated(self, layer: LayerWeights) -> Tensor:
        both = F.linear(self.normed, layer.gate_up_proj)
        width = both.shape[1] // 2
        out = both.new_empty(self._size, width)
        gate_kernel[(self._size, triton.cdiv(width, GATES_AT_ONCE))](
            both, out, width, BLOCK=GATES_AT_ONCE, num_warps=4, **self._launch
        )
        return out

    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        return F.linear(gated, layer.down_proj)[None]


class _SomeRows(_ManyRows):
    """Caldera's own products, in tiles, but for the largest, where cuBLAS is faster."""

    add_norm_launch = PDL_LATE

    def _qkv_proj(self, layer: LayerWeights) -> Tensor:
        return self._product(self.normed, layer.qkv_proj, QKV_TILES, layer.bias)[0]

    def o_proj(self, found: Tensor, layer: LayerWeights) -> Tensor:
        return self._product(found, layer.o_proj, O_TILES)

    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        return self._product(gated, layer.down_proj, DOWN_TILES)

    def _product(
        self, values: Tensor, weight: Tensor, tiles: list[SplitKTiles], bias: Tensor | None = None
    ) -> Tensor:
        """values (B, K) by weight (N, K), as split-K partial sums, (P, B, N)."""
        tile = next(tile for tile in tiles if self._size <= tile.most)
        width, cells = weight.shape
        span = triton.cdiv(triton.cdiv(cells, tile.depth), tile.split_k) * tile.depth
        parts = triton.cdiv(cells, span)
        dtype = torch.float32 if tile.split_k > 1 else values.dtype
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
            **self._launch,
        )
        return out


class _FewRows(_Step):
    """Caldera's own products, whose programs hold their tile of weights before they wait.

    A program has all sequences, which are the narrow side of its product: too narrow for tiles.
    """

    preloads = True

    def __init__(self, steps: PdlSteps, inputs: Tensor) -> None:
        super().__init__(steps, inputs)
        self._rows = max(8, triton.next_power_of_2(self._size))
        self._tiles = next(
            layer_tiles for layer_tiles in LAYER_TILES if self._size <= layer_tiles.most
        )

    def _qkv_proj(self, layer: LayerWeights) -> Tensor:
        return self._product(layer.qkv_proj, layer.bias, len(layer.qkv_proj), self._tiles.qkv_proj)

    def o_proj(self, found: Tensor, layer: LayerWeights) -> Tensor:
        return self._split_k(found, layer.o_proj, self._tiles.o_proj)

    def gated(self, layer: LayerWeights) -> Tensor:
        return self._product(
            layer.gate_up_proj, None, layer.down_proj.shape[1], self._tiles.gate_up_proj, True
        )

    def down(self, gated: Tensor, layer: LayerWeights) -> Tensor:
        return self._split_k(gated, layer.down_proj, self._tiles.down_proj)

    def _product(
        self, weight: Tensor, bias: Tensor | None, width: int, tile: WeightTile, gated: bool = False
    ) -> Tensor:
        """The normed states by a weight, (B, width)."""
        whole = 2 * SLABS * tile.depth  # what a program without a loop has
        assert tile.stages or weight.shape[1] <= whole, (tile, weight.shape)
        out = weight.new_empty(self._size, width)
        product_kernel[(triton.cdiv(len(weight), tile.columns),)](
            self.normed,
            weight,
            bias,
            out,
            self._size,
            width,
            K=weight.shape[1],
            COLUMNS=tile.columns,
            ROWS=self._rows,
            DEPTH=tile.depth,
            SLABS=0 if tile.stages else SLABS,
            GATED=gated,
            BIASED=bias is not None,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **self._launch,
        )
        return out

    def _split_k(self, values: Tensor, weight: Tensor, tile: WeightTile) -> Tensor:
        """values (B, K) by weight (N, K), as split-K partial sums, (P, B, N)."""
        width, cells = weight.shape
        count = triton.cdiv(cells, tile.depth)
        parts = torch.empty(count, self._size, width, device=values.device)
        split_k_kernel[(triton.cdiv(width, tile.columns), count)](
            values,
            weight,
            parts,
            self._size,
            width,
            K=cells,
            COLUMNS=tile.columns,
            ROWS=self._rows,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            **self._launch,
        )
        return parts
