"""Packed attention, against each sequence on its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from caldera.errors import UnsupportedError
from caldera.models.attention import ATTENTION, AttentionLayer, PackedSequences
from caldera.models.forward import hidden_states

Build = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")
# All of one length; one; one rectangle with padding; several rectangles, not in order.
LENGTHS = [[6, 6, 6], [5], [4, 5, 3], [9, 1, 30, 2, 17, 1]]


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """One sequence: query (L, Hq, D), key and value (L, Hkv, D)."""
    rows = []
    groups = query.shape[1] // key.shape[1]
    for position in range(len(query)):
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head in range(query.shape[1]):
            seen = slice(first, position + 1)
            scores = key[seen, head // groups] @ query[position, head] * scale
            heads.append(scores.softmax(0) @ value[seen, head // groups])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "window"), [(2, 2, None), (4, 2, None), (4, 2, 3)])
def test_attention_and_its_gradient(
    lengths: list[int], heads: int, key_heads: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        shape = (sum(lengths), count, 4)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = inputs = [random(heads), random(key_heads), random(key_heads)]
    upstream = random(heads).detach()
    layer = AttentionLayer(None, 0.3, window)
    packed = PackedSequences(lengths, CPU).attend(layer, query, key, value)
    parts = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
    plain = torch.cat([attend_plainly(q, k, v, 0.3, window) for q, k, v in parts])
    torch.testing.assert_close(packed, plain, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(packed, inputs, upstream),
        torch.autograd.grad(plain, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def packed_hidden(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    context = PackedSequences([len(sequence) for sequence in sequences], CPU)
    return hidden_states(model, torch.cat(sequences)[None], context.position_ids, context)


def plain_hidden(model: PreTrainedModel, sequences: list[Tensor], attention: str) -> Tensor:
    model.set_attn_implementation(attention)
    return torch.cat([model.base_model(s[None]).last_hidden_state[0] for s in sequences])


def sequences_of(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(48, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2-window", "qwen3"])
def test_whole_models_in_float32(tiny_model: Build, family: str) -> None:
    model = tiny_model(family)
    sequences = sequences_of([9, 1, 20, 7, 7])
    ours = packed_hidden(model, sequences)
    other = copy.deepcopy(model)
    theirs = plain_hidden(other, sequences, "eager")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    weights = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        if one.grad is None:  # the head
            assert two.grad is None
            continue
        message = f"gradient of {name}"
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-3, msg=message)


def test_whole_model_in_float64(tiny_model: Build) -> None:
    model = tiny_model("starcoder2").double()
    sequences = sequences_of([9, 1, 20, 7, 7])
    with torch.no_grad():
        ours = packed_hidden(model, sequences)
        theirs = plain_hidden(copy.deepcopy(model), sequences, "sdpa")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_order_of_the_sequences_does_not_matter(tiny_model: Build) -> None:
    model = tiny_model("llama")
    sequences = sequences_of([9, 1, 20])
    with torch.no_grad():
        forward = packed_hidden(model, sequences).split([9, 1, 20])
        backward = packed_hidden(model, sequences[::-1]).split([20, 1, 9])
    for one, two in zip(forward, backward[::-1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[6, 6], [9, 1, 20]], ids=str)
def test_autocast(tiny_model: Build, lengths: list[int]) -> None:
    model = tiny_model("qwen3")
    sequences = sequences_of(lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = packed_hidden(model, sequences)
        ours.float().square().sum().backward()
    expected = packed_hidden(model, sequences)
    assert 0 < (ours - expected).abs().mean() < 0.05 * expected.abs().mean()
    assert all(p.grad is not None for p in model.base_model.parameters())


def test_under_autocast_attention_is_in_half_precision(tiny_model: Build) -> None:
    """Rotary embeddings give float32 queries and keys beside bfloat16 values."""
    seen: list[torch.dtype] = []

    class Recorder(PackedSequences):
        def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
            seen.extend([query.dtype, key.dtype, value.dtype])
            return super().attend(layer, query, key, value)

    context = Recorder([3], CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_states(tiny_model("qwen3"), torch.ones(1, 3).long(), context.position_ids, context)
    assert seen == 6 * [torch.bfloat16]


def test_positions_start_anew_in_each_sequence() -> None:
    packed = PackedSequences([3, 1, 2], CPU)
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.cu_seqlens.dtype == torch.int32


def test_a_forward_without_context(tiny_model: Build) -> None:
    with pytest.raises(UnsupportedError, match="LlamaAttention did not pass on the attention cont"):
        tiny_model("llama")(torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("extra", "feature"), [({"softcap": 5.0}, "soft-capping"), ({"s_aux": torch.ones(2)}, "sinks")]
)
def test_what_packed_attention_cannot_do_is_refused(
    tiny_model: Build, extra: dict[str, Any], feature: str
) -> None:
    backbone: Any = tiny_model("llama").base_model
    layer = backbone.layers[0].self_attn
    rows = torch.ones(1, 4, 3, 8)
    attend = AttentionInterface()[ATTENTION]
    with pytest.raises(UnsupportedError, match=f"LlamaAttention needs attention {feature}"):
        attend(layer, rows, rows, rows, None, context=PackedSequences([3], CPU), **extra)
