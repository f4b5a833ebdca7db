"""Decode steps of few sequences on Hopper GPUs: layers of the commonest shape, written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
from torch import Tensor, nn

from caldera.models.exact_norm import epsilon_of, kind_of
from caldera.models.forward import base_module, decoder_layers
from caldera.rollout.native.blocks import PAGE_SIZE
from caldera.rollout.native.few_kernels import (
    attention_kernel,
    pairs_kernel,
    parts_kernel,
    settle_kernel,
)
from caldera.rollout.native.graphs import DeviceState
from caldera.rollout.native.kernels import combine_kernel
from caldera.rollout.native.layer_parts import LAYERS
from caldera.rollout.native.twin import joint_product

HEAD_WIDTHS = (64, 128)
WIDEST, DEEPEST = 1024, 8192
"""Hidden and inner size. Larger layers are bound by reading weights, which cuBLAS does well."""
SLABS, DEPTH = 4, 128
"""Two chunks of so many cells are all of the hidden size."""
HEAD_DEPTH, INNER_DEPTH = 256, 512
"""Cells of a row of the weights that one program of a product in parts has."""
PAIRS, STAGES = 32, 4
"""Pairs of rows that a program has which reads them in a loop, so many blocks ahead."""
PROGRAMS = 512
"""Of attention: so many, or as near as splitting a sequence's keys comes to it."""
MOST_SPLITS = 16
HOPPER = 9


@dataclass(frozen=True)
class _Layer:
    """The weights that the kernels read, which are the twin's."""

    inward: Tensor  # ((Hq + 2 Hkv) D, H)
    bias: Tensor | None
    outward: Tensor  # (H, Hq D)
    gates: Tensor  # (2 I, H)
    down: Tensor  # (H, I)
    before: Tensor  # (H,) the norms' weights
    between: Tensor

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        matrices = (self.inward, self.outward, self.gates, self.down)
        return tuple(matrix.shape for matrix in matrices)


def can_chain(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels may be begun early, and tiles of weights fit into what a program has."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and torch.cuda.get_device_capability(device)[0] == HOPPER


def few_steps(module: nn.Module, state: DeviceState) -> FewSteps | None:
    """Steps of the twin's module, if all its layers are of a shape that is known here."""
    layers = [_known(layer) for layer in decoder_layers(module)]
    trunk = cast(Any, base_module(module).base_model)
    norm = getattr(trunk, "norm", None)
    if norm is None or kind_of(norm) is not False or None in layers:
        return None
    known = cast(list[_Layer], layers)
    if len({layer.sizes for layer in known}) > 1 or len(_numbers(module, norm)) > 1:
        return None  # a step has room for layers of one size
    return FewSteps(module, known, state)


def _numbers(module: nn.Module, last: nn.Module) -> set[tuple[float, ...]]:
    """What is added to squares and multiplies scores, in all layers and the last norm."""
    found: set[tuple[float, ...]] = set()
    for layer in cast(list[Any], decoder_layers(module)):
        norms = (layer.input_layernorm, layer.post_attention_layernorm, last)
        found |= {(epsilon_of(norm), layer.self_attn.scaling) for norm in norms}
    return found


def _known(layer: nn.Module) -> _Layer | None:
    if type(layer) not in LAYERS:
        return None
    parts = cast(Any, layer)
    attention, mlp = parts.self_attn, parts.mlp
    is_mistral = type(layer).__name__.startswith("Mistral")
    window = getattr(attention.config if is_mistral else attention, "sliding_window", None)
    inward, gates = joint_product(attention, "q_proj"), joint_product(mlp, "gate_proj")
    outward, down = attention.o_proj, mlp.down_proj
    if inward is None or gates is None or gates.bias is not None or window is not None:
        return None
    plain = all(type(each) is nn.Linear and each.bias is None for each in (outward, down))
    norms = parts.input_layernorm, parts.post_attention_layernorm
    width, inner = gates.weight.shape[1], gates.weight.shape[0] // 2
    fits = (
        plain
        and all(kind_of(norm) is False for norm in norms)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and attention.head_dim in HEAD_WIDTHS
        and width <= WIDEST and inner <= DEEPEST and width % 16 == 0 and inner % 16 == 0
    )  # fmt: skip
    if not fits:
        return None
    return _Layer(
        inward.weight, inward.bias, outward.weight, gates.weight, down.weight,
        norms[0].weight, norms[1].weight,
    )  # fmt: skip


class FewSteps:
    """From tokens to normed hidden states, (B, H), one token a sequence."""

    most_rows = 64
    """Sequences up to which a step gains by these kernels."""

    def __init__(self, module: nn.Module, layers: list[_Layer], state: DeviceState) -> None:
        self._trunk = cast(Any, base_module(module).base_model)
        self._layers = layers
        self._state = state
        first = cast(Any, decoder_layers(module)[0])
        attention = first.self_attn
        self._epsilon = epsilon_of(first.input_layernorm)
        self._width = attention.head_dim
        self._scale = attention.scaling * 1.4426950408889634  # log2(e)
        self._heads = layers[0].outward.shape[1] // self._width
        self._key_heads = (layers[0].inward.shape[0] // self._width - self._heads) // 2

    def __call__(self, tokens: Tensor, positions: Tensor, inputs: Tensor) -> Tensor:
        """tokens and positions (1, B); inputs (5, B) as recorded steps read them."""
        hidden: Tensor = self._trunk.embed_tokens(tokens)[0]
        angles = self._trunk.rotary_emb(hidden[None], positions)
        norms = [layer.before for layer in self._layers[1:]] + [self._trunk.norm.weight]
        step = _Step(self, hidden, [angle[0].contiguous() for angle in angles], inputs)
        step.settle(None, self._layers[0].before)
        for number, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            step.attend(layer, number)
            step.settle(step.in_parts(step.found, layer.outward, HEAD_DEPTH, 4), layer.between)
            step.gate(layer)
            step.settle(step.in_parts(step.gated, layer.down, INNER_DEPTH, 8), norm)
        return step.normed


class _Step:
    """The tensors of a step, which all layers share, and the kernels that fill them."""

    def __init__(
        self, steps: FewSteps, hidden: Tensor, angles: list[Tensor], inputs: Tensor
    ) -> None:
        self._steps = steps
        self._hidden = hidden  # (B, H)
        self._angles = angles  # cos and sin, (B, D)
        self._inputs = inputs
        self._size = size = len(hidden)
        self.rows = max(8, triton.next_power_of_2(size))
        self.normed = torch.empty_like(hidden)
        layer, width, heads = steps._layers[0], steps._width, steps._heads
        self._new = hidden.new_empty(size, len(layer.inward))
        self.found = hidden.new_empty(size, heads * width)
        self.gated = hidden.new_empty(size, layer.down.shape[1])
        splits = PROGRAMS // (size * steps._key_heads)
        self._splits = min(MOST_SPLITS, 1 << max(1, splits.bit_length() - 1))
        self._partial = torch.empty(size, heads, self._splits, width, device=hidden.device)
        self._weight = torch.empty(size, heads, self._splits, device=hidden.device)
        self._chain: dict[str, Any] = {"CHAINED": False}  # the first kernel is not begun early

    def settle(self, parts: Tensor | None, scale: Tensor) -> None:
        """Add the parts (P, B, H) to the hidden states, and norm them."""
        size, width = self._hidden.shape
        count = 0 if parts is None else len(parts)
        settle_kernel[(size,)](
            parts, self._hidden, scale, self.normed, size, self._steps._epsilon, WIDTH=width,
            WIDTH_PADDED=triton.next_power_of_2(width), PARTS=count,
            PARTS_PADDED=triton.next_power_of_2(max(count, 1)),
            num_warps=8, **self._chain,
        )  # fmt: skip
        if self._hidden.is_cuda:
            self._chain = {"CHAINED": True, "launch_pdl": True}

    def in_parts(self, values: Tensor, weight: Tensor, depth: int, warps: int) -> Tensor:
        """values (B, K) by weight (N, K), as the sum of what is returned, (P, B, N)."""
        width, cells = weight.shape
        count = triton.cdiv(cells, depth)
        columns = 64 if self.rows < 64 else 128
        parts = torch.empty(count, self._size, width, device=values.device)
        parts_kernel[(triton.cdiv(width, columns), count)](
            values, weight, parts, self._size, width, K=cells, COLUMNS=columns, ROWS=self.rows,
            DEPTH=depth, num_warps=warps, **self._chain,
        )  # fmt: skip
        return parts

    def attend(self, layer: _Layer, number: int) -> None:
        steps, width = self._steps, self._steps._width
        key_heads, group = steps._key_heads, steps._heads // steps._key_heads
        at_once = 8 if self.rows <= 16 else 0
        self._pairs(layer.inward, layer.bias, self._new, width // 2, at_once, rotated=True)
        tables = steps._state.tables
        attention_kernel[(self._size, key_heads, self._splits)](
            self._new, steps._state.pointers[number], self._inputs, tables, self._partial,
            self._weight, tables.stride(0), self._size, steps._scale, HEADS=key_heads,
            GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)), WIDTH=width,
            PAGE=PAGE_SIZE, KEYS=8192 // width, SPLITS=self._splits, num_warps=4, num_stages=3,
            **self._chain,
        )  # fmt: skip
        combine_kernel[(self._size * steps._heads,)](
            self._partial, self._weight, self.found, WIDTH=width, WIDTH_PADDED=width,
            SPLITS=self._splits, num_warps=1, **self._chain,
        )  # fmt: skip

    def gate(self, layer: _Layer) -> None:
        at_once = 16 if self.rows == 8 else 0
        self._pairs(layer.gates, None, self.gated, layer.down.shape[1], at_once)

    def _pairs(
        self, weight: Tensor, bias: Tensor | None, out: Tensor, apart: int, at_once: int,
        rotated: bool = False,
    ) -> None:  # fmt: skip
        """`at_once`: how many pairs a program has that reads all of them at once; 0 for none."""
        half = at_once or PAIRS
        blocks = triton.cdiv(apart, half)
        pairs_kernel[(blocks * (len(weight) // (2 * apart)),)](
            self.normed, weight, bias, *self._angles, out, self._size, apart, out.shape[1],
            K=weight.shape[1], HALF=half, ROWS=self.rows, DEPTH=DEPTH,
            SLABS=SLABS if at_once else 0, BLOCKS=blocks,
            TURNED=self._steps._heads + self._steps._key_heads, ROTATED=rotated,
            BIASED=bias is not None, STAGES=STAGES, num_warps=4, **self._chain,
        )  # fmt: skip
