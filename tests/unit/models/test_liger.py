"""Liger's kernels: what is said where they cannot be had, and what they compute where they can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from caldera.config import ModelConfig
from caldera.errors import ConfigError
from caldera.models.attention import PackedSequences
from caldera.models.forward import hidden_states
from caldera.models.loading import apply_liger, load_policy

KEY = "actor_rollout_ref.model"
LIBRARY = "liger_kernel.transformers.monkey_patch"
Model = Callable[..., PreTrainedModel]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the library, which knows llama alone; returns what is asked of it."""
    asked: list[dict[str, Any]] = []

    def apply(model: Any, **keys: Any) -> None:
        if model.config.hidden_act == "gelu":
            raise TypeError("no such llama")
        asked.append({"model": model, **keys})

    stand_in = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply}, _apply_liger_kernel_to_instance=apply
    )
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, LIBRARY, stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return asked


def test_the_library_is_needed(
    model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    config = ModelConfig(path=model_folder(), use_liger=True)
    with pytest.raises(
        ConfigError, match=rf"^{KEY}\.use_liger=true needs liger-kernel: .*pip install"
    ):
        load_policy(config, torch.float32, 1, KEY)


def test_the_trunk_gets_kernels_and_no_loss(tiny_model: Model, library: list[Any]) -> None:
    model = tiny_model("llama")
    apply_liger(model, KEY)
    assert library == [
        {"model": model.model, "cross_entropy": False, "fused_linear_cross_entropy": False}
    ]


def test_models_that_it_does_not_know(tiny_model: Model, library: list[Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY}\.use_liger=true: takes one of llama, not a"):
        apply_liger(tiny_model("qwen2"), KEY)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.use_liger=true: no such llama$"):
        apply_liger(tiny_model("llama", hidden_act="gelu"), KEY)
    assert not library


def test_a_device_is_needed(
    tiny_model: Model, library: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.use_liger=true needs a CUDA device"):
        apply_liger(tiny_model("llama"), KEY)
    assert not library


@pytest.mark.gpu
def test_the_kernels_compute_the_same(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):  # to be put back afterwards
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    tokens = torch.tensor([[3, 7, 1, 40, 12, 5]], device="cuda")
    packed = PackedSequences([6], torch.device("cuda"))
    model: Any = tiny_model("llama")
    model.cuda()
    plain = hidden_states(model, tokens, packed.position_ids, packed)
    apply_liger(model, KEY)
    with_kernels = hidden_states(model, tokens, packed.position_ids, packed)
    assert "Liger" in repr(model)
    torch.testing.assert_close(with_kernels, plain, rtol=1e-4, atol=1e-4)
