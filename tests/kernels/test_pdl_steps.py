"""Decode steps by PDL kernels in Triton's interpreter, against transformers' own layers.

tests/gpu has the tests on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from caldera.models.attention import ATTENTION, PackedSequences
from caldera.models.forward import hidden_states
from caldera.rollout.native.attention import PagedAttention
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cuda import pdl_steps
from caldera.rollout.native.cuda.graphs import DeviceState
from caldera.rollout.native.cuda.pdl_steps import make_pdl_steps
from caldera.rollout.native.cuda.runner import FusedModule
from caldera.rollout.native.steps import Prefill

CPU = torch.device("cpu")
PAGES = 5
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 256, "intermediate_size": 272, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def build(config: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for name, parameter in module.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # which begin as zeros and ones
            nn.init.normal_(parameter, 0.5, 0.5)
    return module.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "kind", "config"),
    [
        (3, "few", Qwen2Config(**SIZES)),
        (12, "few", Qwen2Config(**SIZES)),
        (20, "few", Qwen2Config(**SIZES)),
        (20, "some", Qwen2Config(**SIZES)),
        (20, "many", Qwen2Config(**SIZES)),
        (3, "few", LlamaConfig(**SIZES, head_dim=128)),  # without biases
        (3, "some", LlamaConfig(**SIZES, head_dim=128)),
        (3, "few", LlamaConfig(**{**SIZES, "num_attention_heads": 16}, head_dim=128)),  # wide heads
        (3, "few", Qwen3Config(**SIZES, head_dim=64)),  # with norms of heads
        (3, "many", Qwen3Config(**SIZES, head_dim=128)),
    ],
)
def test_a_step_finds_what_the_whole_sequence_does(
    size: int, kind: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "few":
        monkeypatch.setattr(pdl_steps, "MOST_ROWS", 0)
    if kind == "many":
        monkeypatch.setattr(pdl_steps, "MOST_IN_TILES", 0)
    module = build(config)
    lengths = [1 + (29 * row) % (16 * PAGES - 1) for row in range(size)]
    tokens = torch.randint(0, 100, (1, sum(lengths)))
    packed = PackedSequences(lengths, CPU)
    want = hidden_states(module, tokens, packed.position_ids, packed)

    state = DeviceState(size + 1, 16 * PAGES, 2, CPU)
    state.tables[:size] = torch.randperm(size * PAGES).view(size, PAGES).int()
    cache = KVCache(CacheShape.of(config, torch.float32), size * PAGES, CPU)
    pairs = [(k.data_ptr(), v.data_ptr()) for k, v in zip(cache.keys, cache.values, strict=True)]
    state.pointers.copy_(torch.tensor(pairs))
    last = torch.tensor(lengths).cumsum(0) - 1
    prefill(module, cache, state.tables, lengths, tokens)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        for row, length in enumerate(lengths):  # what the step is to find anew
            slot = int(state.tables[row, (length - 1) // 16]), (length - 1) % 16
            keys[slot], values[slot] = 0, 0
    before = [pages.clone() for pages in cache.keys]

    told = torch.zeros(5, size, dtype=torch.int32)
    told[0], told[1] = torch.arange(size), torch.tensor(lengths) - 1
    told[2] = state.tables[told[0].long(), told[1].long() // 16]
    state.newest[:size] = tokens[0, last]
    steps = make_pdl_steps(FusedModule(module, torch.float32).module, state)
    assert steps is not None
    state.mailbox.send(told.numpy(), size + 1)  # one place that none needs
    inputs = torch.full((5, size + 1), -7, dtype=torch.int32)
    found = steps(inputs)
    assert torch.equal(inputs[:, :size], told)
    torch.testing.assert_close(found[:size], want[last], rtol=1e-4, atol=1e-4)
    for keys, old in zip(cache.keys, before, strict=True):
        changed = (keys != old).flatten(2).any(-1).nonzero()
        assert len(changed) == size  # one token of each sequence, and nothing else


def prefill(
    module: nn.Module, cache: KVCache, tables: Tensor, lengths: list[int], tokens: Tensor
) -> None:
    slots = [tables[row, p // 16].item() * 16 + p % 16 for row, n in enumerate(lengths)
             for p in range(n)]  # fmt: skip
    rows, counts = np.arange(len(lengths)), np.array(lengths)
    step = Prefill(
        rows=rows, token_ids=tokens[0].numpy(), slots=np.array(slots), run=rows, counts=counts,
        ends=counts, tables=tables.numpy(), leaders=rows, page_copies=np.empty((0, 2), int),
        tables_of_rows=tables.numpy(),
    )  # fmt: skip
    positions = torch.from_numpy(step.positions)[None]
    hidden_states(module, tokens, positions, PagedAttention(cache, step, CPU))


@pytest.mark.parametrize(
    ("config", "is_known"),
    [
        (LlamaConfig(**SIZES), True),
        (LlamaConfig(**SIZES, attention_bias=True), False),
        (LlamaConfig(**{**SIZES, "hidden_size": 128}), False),  # heads of 32
        (MistralConfig(**SIZES, sliding_window=None), True),
        (MistralConfig(**SIZES, sliding_window=32), False),
        (Qwen3Config(**SIZES, head_dim=64), True),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), False),
    ],
)
def test_layers_of_other_shapes_are_left_alone(config: Any, is_known: bool) -> None:
    fused = FusedModule(build(config), torch.float32)
    assert (make_pdl_steps(fused.module, DeviceState(1, 16, 2, CPU)) is not None) == is_known
