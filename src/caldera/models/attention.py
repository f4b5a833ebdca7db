"""One attention function for every model, in training and in sampling.

transformers calls the function registered here in each attention layer of a model that was loaded
with `attn_implementation=ATTENTION`. The function hands the work to the *context* that the caller
passed to the model's forward (`model(..., context=...)`): `PackedSequences` here for training, a
paged key/value cache for sampling. So no model is rewritten, and nothing is patched.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from caldera.errors import UnsupportedError
from caldera.models.exact_norm import in_exactness, with_plain_gradient
from caldera.models.forward import send

ATTENTION = "caldera"
"""The `attn_implementation` under which models are loaded."""

PADDING_WASTE = 2.0
"""Sequences are attended in one rectangle while it is at most this many times their tokens."""


class AttentionLayer(NamedTuple):
    """The attention of a decoder layer."""

    module: Any
    """Its `layer_idx` is the layer's number: compiled layers would not share their code with it."""
    scale: float
    """Of the scores."""
    window: int | None
    """How many positions a token sees, itself included; None for all."""


class AttentionContext(Protocol):
    """How the tokens of one forward pass attend to each other."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention. query (T, Hq, D); key and value (T, Hkv, D); returns (T, Hq, D)."""
        ...


def _attention(
    module: Any,
    query: Tensor,  # (1, Hq, T, D)
    key: Tensor,  # (1, Hkv, T, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if context is None:
        raise UnsupportedError(
            f"{type(module).__name__} did not pass on the attention context: "
            "this model does not use the attention interface of transformers"
        )
    for feature, asked in (
        ("attention soft-capping", softcap),
        ("attention sinks", s_aux),
        ("a mask of its own", attention_mask),
    ):
        if asked is not None:
            name = type(module).__name__
            raise UnsupportedError(f"{name} needs {feature}, which is not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Under autocast, the rotary embedding has promoted query and key back to float32.
    rows = [x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)]
    out = context.attend(AttentionLayer(module, scale, sliding_window), *rows)
    return out.unsqueeze(0), None  # (1, T, Hq, D)


# The context knows who attends to whom. No mask function goes with the name: transformers then
# builds none, nor looks at the positions for packed sequences, for which it would wait for a GPU.
AttentionInterface.register(ATTENTION, _attention)


def causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Causal attention over rectangles. query (S, Hq, L, D); key and value (S, Hkv, L, D)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # an explicit repeat keeps the fused kernels available on every device
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    length = query.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    positions = torch.arange(length, device=query.device)
    distance = positions[:, None] - positions[None, :]  # (L, L)
    visible = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)


# Shared key heads always work, but releases that have this argument want them announced.
_ANNOUNCED: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """PyTorch's variable-length flash attention, in which query heads may share key heads.

    query (Tq, Hq, D), key and value (Tk, Hkv, D); cu_queries and cu_keys (S + 1,): where each
    sequence begins. The last query of a sequence sees its last key.
    """
    reach = (-1, 0) if window is None else (window - 1, 0)
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        scale=scale,
        window_size=reach,
        **_ANNOUNCED,
    )
    assert isinstance(out, Tensor)
    return out


class PackedSequences:
    """Sequences laid end to end without padding; each attends causally to itself alone.

    On CUDA in half precision, PyTorch's variable-length flash kernel attends over the packed
    tokens. Elsewhere sequences of similar length are gathered into rectangles: padding at the end
    of a row is never seen by a causal query before it, so no mask is needed.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = lengths
        self.total = sum(lengths)
        self.max_length = max(lengths)
        cumulative = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        self.cu_seqlens = send(cumulative, device)  # (S + 1,)
        positions = torch.cat([torch.arange(n) for n in lengths])
        self.position_ids = send(positions[None], device)  # (1, T)
        self._rectangles: list[tuple[Tensor, Tensor, tuple[int, int]]] | None = None

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, scale, window = layer
        if query.is_cuda and in_exactness():
            from caldera.models.exact_cuda import attend  # Triton comes with CUDA alone

            options: Any = {"scale": scale, "window": window}
            return with_plain_gradient(  # in a fixed order for each token
                partial(attend, positions=self.position_ids[0], **options),
                partial(self._attend_fast, **options),
                query,
                key,
                value,
            )
        return self._attend_fast(query, key, value, scale, window)

    def _attend_fast(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            starts, longest = self.cu_seqlens, self.max_length
            return flash_attention(
                query, key, value, starts, starts, longest, longest, scale, window
            )
        out: Tensor = self._attend_rectangles(query, key, value, scale, window)
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the rectangles of each batch are different ones
    def _attend_rectangles(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if self._rectangles is None:
            self._rectangles = self._plan_rectangles(query.device)
        if len(self._rectangles) == 1 and self._rectangles[0][0].numel() == self.total:
            shape = self._rectangles[0][2]  # all of one length: a view, no gathering
            rows = [x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)]
            attended = causal_sdpa(rows[0], rows[1], rows[2], scale, window)
            return attended.transpose(1, 2).reshape(query.shape)
        parts, targets = [], []
        for gather, kept, shape in self._rectangles:
            rows = [
                x.index_select(0, gather).view(*shape, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            ]  # (S, H, L, D)
            attended = causal_sdpa(rows[0], rows[1], rows[2], scale, window)
            flat = attended.transpose(1, 2).reshape(-1, *query.shape[1:])  # (S * L, Hq, D)
            parts.append(flat.index_select(0, kept))
            targets.append(gather.index_select(0, kept))
        return torch.empty_like(query).index_copy(0, torch.cat(targets), torch.cat(parts))

    def _plan_rectangles(
        self, device: torch.device
    ) -> list[tuple[Tensor, Tensor, tuple[int, int]]]:
        """Groups of sequences as (token index of each cell, cells that hold a token, shape)."""
        starts = [0]
        for length in self.lengths[:-1]:
            starts.append(starts[-1] + length)
        order = sorted(range(len(self.lengths)), key=lambda s: self.lengths[s])
        groups: list[list[int]] = [[]]
        tokens = 0  # of the newest group
        for sequence in order:  # ascending, so the newest member sets the rectangle's width
            length = self.lengths[sequence]
            if groups[-1] and length * (len(groups[-1]) + 1) > PADDING_WASTE * (tokens + length):
                groups.append([])
                tokens = 0
            groups[-1].append(sequence)
            tokens += length
        return [self._rectangle(sorted(group), starts, device) for group in groups]

    def _rectangle(
        self, group: list[int], starts: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor, tuple[int, int]]:
        first = torch.tensor([starts[s] for s in group])[:, None]
        length = torch.tensor([self.lengths[s] for s in group])[:, None]
        width = int(length.max())
        column = torch.arange(width)[None, :]
        cells = first + torch.minimum(column, length - 1)  # padding repeats the last token
        kept = (column < length).flatten().nonzero().flatten()
        return cells.flatten().to(device), kept.to(device), (len(group), width)
