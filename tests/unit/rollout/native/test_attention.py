from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from caldera.errors import UnsupportedError
from caldera.models.attention import AttentionLayer
from caldera.rollout.native.attention import PagedAttention, plan_rectangles
from caldera.rollout.native.blocks import BlockManager, pages_for
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.steps import Decode, Prefill

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel

CPU = torch.device("cpu")
MODULE = SimpleNamespace(layer_idx=0)
HEADS, KV_HEADS, DIM = 4, 2, 8


def attend_last(query: Any, keys: Any, values: Any, scale: Any, window: Any) -> Any:
    """query (Hq, D) of the last of L tokens; keys and values (L, Hkv, D): plainly, by hand."""
    out = []
    first = 0 if window is None else max(0, len(keys) - window)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[first:, group] @ query[head] * scale
        out.append(scores.softmax(0) @ values[first:, group])
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("prompts", [[20, 18, 25], [3, 90, 4, 40, 100, 1]])
def test_decode_attends_to_the_pages_of_its_sequence(
    prompts: list[int], window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(CacheShape(1, KV_HEADS, DIM, torch.float32), pages=30, device=CPU)
    lengths = np.array(prompts)  # one token more is decoded
    blocks = BlockManager(30, len(lengths), 8)
    for row, length in enumerate(lengths.tolist()):
        blocks.allocate(row, length + 1)
    tokens = int(lengths.sum())
    query, key, value = (
        torch.randn(tokens + len(lengths), heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    rows = np.arange(len(lengths))
    owners = np.repeat(rows, lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = blocks.slots(owners, positions)
    step = Prefill(
        rows=rows, token_ids=positions, slots=slots, run=rows, counts=lengths, ends=lengths,
        tables=blocks.tables, leaders=rows, page_copies=np.empty((0, 2), int),
        tables_of_rows=blocks.tables,
    )  # fmt: skip
    assert step.is_whole and step.positions.tolist() == positions.tolist()
    prefill = PagedAttention(cache, step, CPU)
    layer = AttentionLayer(MODULE, 0.3, window)
    prefilled = prefill.attend(layer, query[:tokens], key[:tokens], value[:tokens])

    tables = blocks.tables[:, : pages_for(int(lengths.max()) + 1)]
    next_step = Decode(rows, rows, blocks.slots(rows, lengths), lengths + 1, tables)
    decode = PagedAttention(cache, next_step, CPU)
    decoded = decode.attend(layer, query[tokens:], key[tokens:], value[tokens:])

    start = 0
    for row, length in enumerate(lengths.tolist()):
        end = start + length
        new = slice(tokens + row, tokens + row + 1)
        last = attend_last(query[end - 1], key[start:end], value[start:end], 0.3, window)
        torch.testing.assert_close(prefilled[end - 1], last)
        keys, values = (torch.cat([x[start:end], x[new]]) for x in (key, value))
        expected = attend_last(query[new][0], keys, values, 0.3, window)
        torch.testing.assert_close(decoded[row], expected)
        start = end


@pytest.mark.parametrize(
    ("counts", "ends", "groups"),
    [
        ([1] * 4, [30, 20, 25, 17], [[0, 1, 2, 3]]),
        ([1] * 8, [10, 400, 20, 300, 30, 5, 900, 33], [[5, 0, 2, 4, 7], [3, 1, 6]]),
        ([1, 20, 1, 22, 1], [40, 60, 45, 22, 300], [[0, 2], [4], [1, 3]]),
    ],
)
def test_sequences_of_similar_size_are_one_rectangle(
    counts: list[Any] | list[int], ends: list[int], groups: list[list[int]]
) -> None:
    found = plan_rectangles(np.array(counts), np.array(ends))
    assert [group.tolist() for group in found] == groups


def test_keys_of_an_unexpected_shape_are_refused() -> None:
    cache = KVCache(CacheShape(1, KV_HEADS, DIM, torch.float32), pages=1, device=CPU)
    with pytest.raises(UnsupportedError, match=r"layer 0 .*\(2, 4\).*\(2, 8\)"):
        cache.write(0, torch.tensor([0]), torch.zeros(1, 2, 4), torch.zeros(1, 2, 8))


def test_the_shape_of_a_cache_comes_from_the_model(build_model: BuildModel) -> None:
    shape = CacheShape.of(build_model("gemma3").config, torch.bfloat16)
    assert shape == CacheShape(layers=2, heads=2, head_dim=8, dtype=torch.bfloat16)
    assert shape.page_bytes == 2 * 2 * 16 * 2 * 8 * 2
