"""Kernels whose result for a row depends on that row alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from caldera.errors import UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.models.exact import exactness, is_exact, make_exact
from caldera.models.exact_norm import in_exactness


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(32, 48), (100, 33), (576, 192)])
def test_a_row_of_a_product_depends_on_no_other(widths: tuple[int, ...], dtype: Any) -> None:
    weight = random(widths[1], widths[0], seed=1).to(dtype)
    values = random(100, widths[0]).to(dtype)
    with exactness():
        whole = F.linear(values, weight)
        for rows in ([5], [99, 3], list(range(40, 73)), list(range(99, -1, -1))):
            assert torch.equal(F.linear(values[rows], weight), whole[rows])
            assert torch.equal(values[rows] @ weight.t(), whole[rows])
            assert torch.equal(torch.mm(values[rows], weight.t()), whole[rows])
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(whole, F.linear(values, weight), atol=tolerance, rtol=0.02)


@pytest.mark.parametrize("function", [torch.cos, torch.exp, F.silu, F.gelu, torch.tanh])
def test_functions_take_one_form_everywhere(function: Any) -> None:
    values = random(70_003)
    with exactness():
        whole = function(values)
        for start, stop in ((0, 1), (5, 22), (69_990, 70_003), (3, 40_000)):
            assert torch.equal(function(values[start:stop]), whole[start:stop])
    torch.testing.assert_close(whole, function(values))


def test_log_probs_of_both_sides_are_the_same_numbers() -> None:
    logits = random(9, 50_001)
    with exactness():
        normaliser = torch.logsumexp(logits, dim=-1)
        alone = torch.stack([torch.logsumexp(row[None], dim=-1)[0] for row in logits])
        log_probs = logits.log_softmax(-1)
    assert torch.equal(normaliser, alone)
    assert torch.equal(log_probs, logits - normaliser[:, None])
    torch.testing.assert_close(log_probs, logits.log_softmax(-1))


def test_a_query_depends_on_its_own_keys_alone() -> None:
    length, heads, width = 150, 2, 8
    query, key, value = (random(1, heads, length, width, seed=s) for s in range(3))
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    with exactness():
        whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
        for place in (0, 7, 63, 64, 149):
            # one query, a cache with room for more than is seen, and another sequence beside it
            room = torch.cat([key[:, :, : place + 1], random(1, heads, 70, width, seed=9)], dim=2)
            rooms = torch.cat(
                [value[:, :, : place + 1], random(1, heads, 70, width, seed=8)], dim=2
            )
            mask = torch.zeros(2, 1, 1, room.shape[2])
            mask[0, ..., place + 1 :] = -torch.inf
            out = F.scaled_dot_product_attention(
                query[:, :, place : place + 1].expand(2, -1, -1, -1),
                room.expand(2, -1, -1, -1), rooms.expand(2, -1, -1, -1),
                attn_mask=mask, scale=0.3,
            )  # fmt: skip
            assert torch.equal(out[0, :, 0], whole[0, :, place])
        # a part of the queries over what comes before it
        seen = torch.arange(length) <= torch.arange(90, 130)[:, None]
        part = F.scaled_dot_product_attention(
            query[:, :, 90:130], key, value, attn_mask=seen, scale=0.3
        )
        assert torch.equal(part, whole[:, :, 90:130])
    torch.testing.assert_close(whole, plain)


def test_gradients_are_those_of_the_ordinary_kernels() -> None:
    query, key, value = inputs = [random(2, 3, 40, 8, seed=s).requires_grad_() for s in range(3)]
    weight = random(16, 8, seed=5).requires_grad_()

    def loss() -> Any:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.silu(F.linear(out, weight)).square().sum()

    plain = torch.autograd.grad(loss(), [*inputs, weight])
    with exactness():
        value = loss()
    for ours, theirs in zip(torch.autograd.grad(value, [*inputs, weight]), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_has_no_exact_form_is_refused() -> None:
    with exactness(), pytest.raises(UnsupportedError, match=r"exact=True.*bmm"):
        torch.bmm(random(2, 3, 4), random(2, 4, 5))
    with exactness(), pytest.raises(UnsupportedError, match="other than by weights"):
        random(2, 3, 4) @ random(2, 4, 5)
    with exactness():  # nothing is added up
        random(2, 3, 1) @ random(2, 1, 5)


def test_it_ends_where_it_is_left() -> None:
    assert not in_exactness()
    with exactness():
        assert in_exactness()
        with exactness():
            pass
        assert in_exactness()
    with exactness(wanted=False):
        assert not in_exactness()
    with pytest.raises(ZeroDivisionError), exactness():
        raise ZeroDivisionError
    assert not in_exactness()


def test_a_module_is_marked() -> None:
    module = nn.Linear(2, 2)
    assert not is_exact(module)
    make_exact(module)
    assert is_exact(module)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config, Gemma3TextConfig])
def test_norms_of_known_kinds_are_found_and_change_nothing_elsewhere(config: Any) -> None:
    module = AutoModelForCausalLM.from_config(
        config(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
        ),
        attn_implementation=ATTENTION,
    )  # fmt: skip
    norms = [part for part in module.modules() if type(part).__name__.endswith("RMSNorm")]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    values = [torch.randn(3, len(norm.weight)) for norm in norms]
    want = [norm(value) for norm, value in zip(norms, values, strict=True)]
    make_exact(module)
    assert all("forward" in norm.__dict__ for norm in norms)
    with exactness():  # on a CPU they are what they were
        for norm, value, before in zip(norms, values, want, strict=True):
            torch.testing.assert_close(norm(value), before)
    copied = copy.deepcopy(module)
    assert copied.model.norm.forward.args[0] is copied.model.norm
