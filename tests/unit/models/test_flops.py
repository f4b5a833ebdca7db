"""Operations of a model: by hand, and as PyTorch counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForTokenClassification, PreTrainedModel

from caldera.models.flops import Arithmetic, promised_flops, promised_flops_by_name

Build = Callable[..., PreTrainedModel]
# Of a layer of the tiny Llama: query and output, key and value of two of four heads, the MLP.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
BACKBONE = 2 * LAYER
HEAD = 48 * 32
LENGTHS = [5, 3]
ATTENTION = 4 * 2 * 32 * (25 + 9) / 2  # 4 * layers * heads * head_dim * sum of squares / 2


def test_by_hand(tiny_model: Build) -> None:
    forward = 2 * BACKBONE * 8 + 2 * HEAD * 6 + ATTENTION
    for family in ("llama", "qwen2"):  # whose head is its embedding
        model = tiny_model(family)
        assert Arithmetic.of(model).flops(LENGTHS, head_tokens=6, training=False) == forward
        assert Arithmetic.of(model).flops(LENGTHS, head_tokens=6, training=True) == 3 * forward


def test_heads_wider_than_the_model(tiny_model: Build) -> None:
    model = tiny_model("qwen3")  # four heads of 16
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64
    expected = 2 * 2 * layer * 8 + 2 * HEAD * 6 + 2 * ATTENTION
    assert Arithmetic.of(model).flops(LENGTHS, 6, False) == expected


def test_a_window(tiny_model: Build) -> None:
    """The second layer sees four tokens: 4 * 5 - 8 and 9 / 2 pairs."""
    model = tiny_model("qwen2-window")
    attention = 4 * 32 * (25 / 2 + 9 / 2 + 12 + 9 / 2)
    expected = 2 * BACKBONE * 8 + 2 * HEAD * 6 + attention
    assert Arithmetic.of(model).flops(LENGTHS, 6, False) == expected


def test_a_value_head(model_folder: Callable[..., str]) -> None:
    model = AutoModelForTokenClassification.from_pretrained(model_folder(), num_labels=1)
    forward = 2 * BACKBONE * 8 + 2 * 32 * 6 + ATTENTION
    assert Arithmetic.of(model).flops(LENGTHS, 6, False) == forward
    assert Arithmetic.of(model).flops(LENGTHS, 6, True) == 3 * forward


def test_an_adapter_spares_the_gradients_of_the_frozen(tiny_model: Build) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(tiny_model("llama"), config)
    adapter = 2 * (32 * 2 + 2 * 32)
    forward = 2 * (BACKBONE + adapter) * 8 + 2 * HEAD * 6 + ATTENTION
    assert Arithmetic.of(model).flops(LENGTHS, 6, False) == forward
    training = 4 * BACKBONE * 8 + 6 * adapter * 8 + 4 * HEAD * 6 + 3 * ATTENTION
    assert Arithmetic.of(model).flops(LENGTHS, 6, True) == training


def test_mixtures_of_experts_are_not_estimated(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.experts = nn.Parameter(torch.zeros(2, 4, 8))
    assert Arithmetic.of(model).flops(LENGTHS, 6, True) is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "starcoder2"])
def test_as_pytorch_counts(tiny_model: Build, family: str) -> None:
    """PyTorch counts attention without its mask, so the comparison adds the other half."""
    rows, length = 3, 40
    model = tiny_model(family, max_position_embeddings=64)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 48, (rows, length))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(ids)
    with FlopCounterMode(display=False) as both:
        model(ids).logits.sum().backward()
    lengths = [length] * rows
    masked_half = 4 * 2 * 32 * rows * length**2 / 2
    counts = ((forward, False, masked_half), (both, True, 3 * masked_half))
    for counter, training, rest in counts:
        ours: Any = Arithmetic.of(model).flops(lengths, rows * length, training)
        assert counter.get_total_flops() == pytest.approx(ours + rest, rel=0.02)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA RTX A1000", None),
        ("Some GPU", None),
    ],
)
def test_what_gpus_promise(name: str, flops: float | None) -> None:
    assert promised_flops_by_name(name) == flops


def test_a_cpu_promises_nothing() -> None:
    assert promised_flops(torch.device("cpu")) is None
