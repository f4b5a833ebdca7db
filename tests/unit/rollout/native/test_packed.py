"""Weights in the layout of oneDNN: the same numbers, always of the newest weights."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from caldera.config import RolloutConfig
from caldera.config.rollout import NativeRolloutConfig
from caldera.models.attention import ATTENTION
from caldera.rollout.base import Request, SamplingParams
from caldera.rollout.native.cpu.kernels import find_compiler
from caldera.rollout.native.cpu.runner import FusedBackbone, FusedLayer, PackedRunner, SmallLayer
from caldera.rollout.native.cpu.weights import can_pack
from caldera.rollout.native.engine import NativeRollout
from caldera.rollout.native.runner import sum_of_bits

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 700, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
pytestmark = pytest.mark.skipif(
    not can_pack(nn.Linear(1, 1), torch.float32), reason="this processor has no packed products"
)


needs_a_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


def build(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=ATTENTION
    )
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):  # they begin at nothing
            nn.init.normal_(parameter)
        if name.endswith("norm.weight"):  # and these at ones
            nn.init.normal_(parameter, 1.0, 0.3)
    return module.eval()


def sampler(module: nn.Module, **keys: Any) -> NativeRollout:
    config = RolloutConfig(**{"max_model_len": 64, "max_num_seqs": 8, **keys})
    return NativeRollout(config, module, CPU)


def work() -> list[Request]:
    return [
        Request(
            [(7 * i + j) % 700 for j in range(1 + 3 * i)],
            SamplingParams(max_tokens=4 + i, temperature=[0.0, 1.0, 0.7][i % 3]), seed=i,
        )
        for i in range(12)
    ]  # fmt: skip


def assert_alike(module: nn.Module, rollout: NativeRollout, **keys: Any) -> None:
    want = sampler(module, enforce_eager=True, **keys).generate(work())
    got = rollout.generate(work())
    assert [a.token_ids for a in got] == [a.token_ids for a in want]
    for one, other in zip(got, want, strict=True):
        assert np.abs(np.subtract(one.log_probs, other.log_probs)).max() < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES, tie_word_embeddings=True),  # biases
        LlamaConfig(**SIZES, hidden_act="gelu"),  # a gate that oneDNN is not asked for
        LlamaConfig(**SIZES, mlp_bias=True, attention_bias=True),
        MistralConfig(**SIZES, sliding_window=9),
        Qwen3Config(**SIZES, head_dim=64),  # norms of queries and keys
        LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 96}),  # too small for it
    ],
    ids=["biases", "gelu", "all-biases", "window", "more-norms", "small"],
)
@pytest.mark.parametrize("compiler", ["found", "none"])
def test_packed_weights_sample_what_plain_ones_do(
    config: Any, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "none":
        monkeypatch.setenv("CXX", "no-such-compiler")
    module = build(config)
    rollout = sampler(module)
    assert isinstance(rollout._runner, PackedRunner)
    assert_alike(module, rollout)


@needs_a_compiler
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 96}), SmallLayer),
        (Qwen2Config(**SIZES | {"hidden_size": 64, "intermediate_size": 96}), SmallLayer),
        (MistralConfig(**SIZES | {"hidden_size": 64}, sliding_window=5), SmallLayer),
        (Qwen3Config(**SIZES | {"hidden_size": 64}, head_dim=32), SmallLayer),
        (Qwen3Config(**SIZES, head_dim=64, attention_bias=True), FusedLayer),
        (LlamaConfig(**SIZES | {"hidden_size": 96, "intermediate_size": 50}), FusedLayer),
        (LlamaConfig(**SIZES), FusedLayer),
    ],
    ids=["plain", "biases", "window", "more-norms", "norms-and-biases", "odd-sizes", "large"],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_layers_of_each_kind(config: Any, kind: type, chunked: bool) -> None:
    module = build(config)
    keys = {"enable_chunked_prefill": chunked, "max_num_batched_tokens": 64}
    rollout = sampler(module, **keys)
    fused = rollout._runner._backbone
    assert isinstance(fused, FusedBackbone)
    assert {type(layer) for layer in fused._layers} == {kind}
    assert_alike(module, rollout, **keys)


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    module = build(LlamaConfig(**SIZES))
    with caplog.at_level(logging.INFO):
        rollout = sampler(module)
    assert "there is no C++ compiler (g++, clang++, c++, or the variable CXX)" in caplog.text
    assert isinstance(rollout._runner, PackedRunner)
    assert not isinstance(rollout._runner._backbone, FusedBackbone)
    assert_alike(module, rollout)


def test_a_step_that_breaks_off_leaves_nothing_behind() -> None:
    module = build(LlamaConfig(**SIZES, hidden_act="gelu"))  # gate and up are one product
    rollout = sampler(module)
    rollout.generate(work())
    gate = rollout._runner._module.model.layers[1].mlp.act_fn  # type: ignore[union-attr,index]
    with (
        patch.object(gate, "forward", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        rollout.generate(work())
    assert_alike(module, rollout)


@needs_a_compiler
@pytest.mark.parametrize("size", [64, 256])
def test_another_default_of_torch(size: int) -> None:
    module = build(LlamaConfig(**SIZES | {"hidden_size": size}))
    rollout = sampler(module)
    want = rollout.generate(work())
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = rollout.generate(work())
    finally:
        torch.set_default_dtype(torch.float32)
    assert [a.token_ids for a in got] == [a.token_ids for a in want]


@needs_a_compiler
def test_a_class_of_the_same_name_is_not_taken_for_it() -> None:
    module = build(LlamaConfig(**SIZES))
    layer = module.model.layers[1]  # type: ignore[union-attr,index]

    class LlamaDecoderLayer(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, *given: Any, **named: Any) -> Any:
            return 0.5 * super().forward(hidden_states, *given, **named)

    layer.__class__ = LlamaDecoderLayer
    rollout = sampler(module)
    assert not isinstance(rollout._runner._backbone, FusedBackbone)
    assert_alike(module, rollout)


def test_half_precision() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not multiply in bfloat16")
    module = build(Qwen2Config(**SIZES), torch.bfloat16)
    rollout = sampler(module)
    assert isinstance(rollout._runner, PackedRunner)
    greedy = [Request([3 + i, 9, 200 - i], SamplingParams(6, temperature=0.0), i) for i in range(6)]
    want = sampler(module, enforce_eager=True).generate(greedy)
    for one, other in zip(rollout.generate(greedy), want, strict=True):
        assert abs(one.log_probs[0] - other.log_probs[0]) < 0.05


def test_the_head_is_packed_once() -> None:
    rollout = sampler(build(Qwen2Config(**SIZES, tie_word_embeddings=True)))
    packs = rollout._runner._packs  # type: ignore[attr-defined]
    assert sum(pack._weights[0].shape[0] == SIZES["vocab_size"] for pack in packs) == 1


def test_sequences_that_grow_far_and_change_places() -> None:
    module = build(LlamaConfig(**SIZES))
    keys = {"max_model_len": 300, "max_num_seqs": 5, "kv_cache_blocks": 60}
    requests = [
        Request([5 + i] * (3 + 20 * (i % 3)), SamplingParams(max_tokens=10 + 37 * (i % 6)), seed=i)
        for i in range(14)
    ]
    want = sampler(module, enforce_eager=True, **keys).generate(requests)
    got = sampler(module, **keys).generate(requests)
    same = [a.token_ids == b.token_ids for a, b in zip(got, want, strict=True)]
    assert sum(same) >= len(requests) - 1  # rounding may flip a token that was nearly tied


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("prefixes", [False, True])
def test_nobody_has_to_tell_that_an_optimiser_took_a_step(
    size: int, prefixes: bool, eager: bool
) -> None:
    module = build(LlamaConfig(**SIZES | {"hidden_size": size}))
    rollout = sampler(module, enable_prefix_caching=prefixes, enforce_eager=eager)
    rollout.generate(work())
    # Which counts no versions of the parameters up, nor moves them.
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    before = [(each._version, each.data_ptr()) for each in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    assert [(each._version, each.data_ptr()) for each in module.parameters()] == before
    assert_alike(module, rollout)


@pytest.mark.parametrize("shape", [(3,), (8,), (5, 7), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_bits_knows_each_of_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for values in (torch.randn(shape).to(dtype), torch.randn(20, 7).to(dtype)[1:, 2:6]):
        before = sum_of_bits(values)
        assert sum_of_bits(values.clone()) == before
        for place in range(values.numel()):
            others = values.clone()
            others.view(-1)[place] = others.view(-1)[place].nextafter(
                torch.tensor(9.0, dtype=dtype)
            )
            assert sum_of_bits(others) != before


def test_weights_that_change_are_packed_again() -> None:
    module = build(LlamaConfig(**SIZES))
    rollout = sampler(module)
    first = rollout.generate(work())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert_alike(module, rollout)  # nobody has told of a new version
    assert [a.token_ids for a in rollout.generate(work())] != [a.token_ids for a in first]
    for parameter in module.parameters():  # which PyTorch does not count as a change
        parameter.data.mul_(1.5)
    rollout.version += 1
    assert_alike(module, rollout)


def test_sleep_gives_the_copies_back_and_the_module_is_left_alone() -> None:
    module = build(LlamaConfig(**SIZES))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    rollout = sampler(module)
    rollout.generate(work())
    packs = rollout._runner._packs  # type: ignore[attr-defined]
    assert all(pack._packed is not None for pack in packs)
    rollout.sleep()
    assert all(pack._packed is None for pack in packs)
    rollout.wake_up()
    assert_alike(module, rollout)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert {
        type(part).__name__ for part in module.modules() if "Part" in type(part).__name__
    } == set()


def test_adapters_are_not_merged() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    module = peft.get_peft_model(build(LlamaConfig(**SIZES)), config).eval()
    rollout = sampler(module)
    assert isinstance(rollout._runner, PackedRunner)
    assert_alike(module, rollout)


def test_what_is_not_packed() -> None:
    module = build(LlamaConfig(**SIZES))
    exact = sampler(module, native=NativeRolloutConfig(exact=True))
    mixed = build(LlamaConfig(**SIZES))
    for rollout in (exact, sampler(module, enforce_eager=True), sampler(mixed, dtype="bfloat16")):
        assert not isinstance(rollout._runner, PackedRunner)
