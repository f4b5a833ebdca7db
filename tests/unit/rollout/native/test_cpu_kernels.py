"""Kernels that are compiled for this machine: against PyTorch, for any mix of tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from caldera.errors import UnsupportedError
from caldera.models.attention import AttentionLayer
from caldera.rollout.native.blocks import PAGE_SIZE, pages_for
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cpu import kernels as module
from caldera.rollout.native.cpu.attention import CompiledAttention
from caldera.rollout.native.cpu.kernels import cpu_kernels, why_not
from caldera.rollout.native.layers import AttentionParts
from caldera.rollout.native.steps import Decode, Prefill

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    why_not(torch.float32, 64) is not None, reason=str(why_not(torch.float32, 64))
)


class Sequences:
    """Keys and values of some sequences, in pages that lie anywhere."""

    def __init__(self, counts: list[int], befores: list[int], heads: int, head_dim: int) -> None:
        self.counts, self.befores = np.array(counts), np.array(befores)
        self.ends = self.counts + self.befores
        width = pages_for(int(self.ends.max()))
        order = np.random.default_rng(1).permutation(len(counts) * width)
        self.tables = order.reshape(len(counts), width)
        self.cache = KVCache(CacheShape(1, heads, head_dim, torch.float32), order.size, CPU)
        for pages in (*self.cache.keys, *self.cache.values):
            pages.normal_()
        pairs = zip(self.befores, self.ends, strict=True)
        self.positions = np.concatenate([np.arange(*pair) for pair in pairs])
        self.rows = np.repeat(np.arange(len(counts)), self.counts)
        pages_of = self.tables[self.rows, self.positions // PAGE_SIZE]
        self.slots = pages_of * PAGE_SIZE + self.positions % PAGE_SIZE

    def step(self) -> Prefill | Decode:
        rows, tokens = np.arange(len(self.counts)), np.zeros(len(self.slots), dtype=np.int64)
        if (self.counts == 1).all():
            return Decode(rows, tokens, self.slots, self.ends, self.tables)
        none = np.empty((0, 2), dtype=np.int64)
        return Prefill(
            rows=rows, token_ids=tokens, slots=self.slots, run=rows, counts=self.counts,
            ends=self.ends, tables=self.tables, leaders=rows, page_copies=none,
            tables_of_rows=self.tables,
        )  # fmt: skip

    def expected(self, heads: tuple[Tensor, ...], scale: float, window: int | None) -> Tensor:
        query, key, value = heads
        keys, values = (
            pages[0].view(-1, *pages[0].shape[2:]).clone()
            for pages in (self.cache.keys, self.cache.values)
        )
        keys[self.slots], values[self.slots] = key, value
        group = query.shape[1] // key.shape[1]
        out = torch.empty_like(query)
        for token, (row, position) in enumerate(zip(self.rows, self.positions, strict=True)):
            first = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(first, position + 1)
            cells = self.tables[row, seen // PAGE_SIZE] * PAGE_SIZE + seen % PAGE_SIZE
            near, told = (
                each[cells].repeat_interleave(group, 1).double() for each in (keys, values)
            )
            weights = (scale * torch.einsum("hd,lhd->hl", query[token].double(), near)).softmax(-1)
            out[token] = torch.einsum("hl,lhd->hd", weights, told).float()
        return out


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_attention_of_any_mix(data: st.DataObject) -> None:
    head_dim, heads = data.draw(st.sampled_from([8, 24, 64])), data.draw(st.integers(1, 3))
    group, window = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([None, 1, 7, 40]))
    count = data.draw(st.integers(1, 12))
    most = data.draw(st.sampled_from([1, 20]))
    counts = data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
    places = st.sampled_from([0, 1, 15, 16, 70])
    befores = data.draw(st.lists(places, min_size=count, max_size=count))
    some = Sequences(counts, befores, heads, head_dim)
    torch.manual_seed(0)
    joint = torch.randn(sum(counts), heads * (group + 2), head_dim)
    query, key, value = joint.split_with_sizes([heads * group, heads, heads], 1)
    parts = (query, key, value)
    want = some.expected(parts, 0.3, window)
    kernels = cpu_kernels(head_dim)
    assert kernels is not None
    attention = CompiledAttention(kernels, some.cache, some.step())
    got = attention.turn_and_attend(AttentionParts(0, 0.3, window), parts, None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    kept = some.cache.keys[0].view(-1, heads, head_dim)[some.slots]
    assert torch.equal(kept, key)


def test_scores_far_apart() -> None:
    some = Sequences([1, 1], [40, 3], 1, 16)
    heads = 80 * torch.randn(2, 1, 16), 80 * torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    want = some.expected(heads, 1.0, None)
    kernels = cpu_kernels(16)
    assert kernels is not None
    attention = CompiledAttention(kernels, some.cache, some.step())
    got = attention.turn_and_attend(AttentionParts(0, 1.0, None), heads, None)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_token_finds_the_same_bits_in_any_company() -> None:
    kernels = cpu_kernels(24)
    assert kernels is not None
    befores = [3, 40, 17, 90, 16, 8, 31, 60, 2]
    some = Sequences([1] * len(befores), befores, 2, 24)
    query, key, value = torch.randn(9, 6, 24), torch.randn(9, 2, 24), torch.randn(9, 2, 24)
    attention = CompiledAttention(kernels, some.cache, some.step())
    together = attention.turn_and_attend(AttentionParts(0, 0.3, None), (query, key, value), None)
    for row, (slot, end) in enumerate(zip(some.slots, some.ends, strict=True)):
        one = np.array([row])
        step = Decode(one, one, slot[None], end[None], some.tables[one])
        heads = (query[one], key[one], value[one])
        attention = CompiledAttention(kernels, some.cache, step)
        alone = attention.turn_and_attend(AttentionParts(0, 0.3, None), heads, None)
        assert torch.equal(alone[0], together[row])


def test_values_of_another_size_are_refused() -> None:
    kernels = cpu_kernels(16)
    assert kernels is not None
    some = Sequences([1, 1], [4, 20], 2, 16)
    attention = CompiledAttention(kernels, some.cache, some.step())
    layer = AttentionLayer(SimpleNamespace(layer_idx=0), 1.0, None)
    query, key, value = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 8)
    with pytest.raises(UnsupportedError, match=r"layer 0 has keys or values of shape \(2, 8\)"):
        attention.attend(layer, query, key, value)


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(module, "CODE_FOLDER", tmp_path / "code")
    monkeypatch.setattr(module, "cpu_kernels", module.cpu_kernels.__wrapped__)
    assert module.cpu_kernels(64) is None
    assert f"sampling without compiled kernels: {broken}: no room" in caplog.text
    assert list((tmp_path / "code").iterdir()) == []


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CODE_FOLDER", tmp_path)
    compiler = module.find_compiler()
    assert compiler is not None
    first = module._compiled(compiler, 16)
    at = first.stat().st_mtime_ns
    assert module._compiled(compiler, 16) == first
    assert first.stat().st_mtime_ns == at
    assert [each.name for each in tmp_path.iterdir()] == [first.name]
    assert module._compiled(compiler, 24) != first
