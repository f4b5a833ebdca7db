"""What every layout does to a module before it lays it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from caldera.engine.base import EngineOptions
from caldera.models.attention import PackedSequences
from caldera.models.exact_mode import in_exactness
from caldera.models.forward import decoder_layers
from caldera.models.loading import enable_checkpointing
from caldera.models.ulysses import SharedSequences

COMPILED_CONTEXTS = (PackedSequences, SharedSequences)
"""Forward passes with these are training's. Samplers that use the same module bring others."""


def prepare_module(module: nn.Module, options: EngineOptions) -> None:
    """Freeze, checkpoint and compile as the options say."""
    if options.optim is None:
        module.requires_grad_(False)
    if options.gradient_checkpointing:
        enable_checkpointing(module)
    if options.compiles:
        compile_layers(module)


def compile_layers(module: nn.Module) -> None:
    """Compile each layer's forward, for training alone. All layers share the compiled code."""
    for layer in decoder_layers(module):
        layer.forward = _compiled_for_training(layer.forward)


def _compiled_for_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward, dynamic=True)

    def choose(*args: Any, **kwargs: Any) -> Any:
        is_training = isinstance(kwargs.get("context"), COMPILED_CONTEXTS) and not in_exactness()
        return (compiled if is_training else forward)(*args, **kwargs)

    return choose
