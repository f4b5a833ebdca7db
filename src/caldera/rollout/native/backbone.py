"""The decoder backbone as the sampler runs it: as it is, or compiled once for all steps.

To the compiler, attention is one opaque operation, which looks up at run time how the tokens of
this step attend, and in which layer. So prefills and decodings of any size run the same code, and
so do all layers of a kind.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext, AttentionLayer
from caldera.models.forward import base_module, decoder_layers, hidden_states

CODE_FOLDER = Path("~/.cache/caldera/compiled")
"""The folder of compiled code for the next process, unless PyTorch's own variable is set."""

_current = threading.local()


@contextmanager
def _attending(context: AttentionContext) -> Iterator[None]:
    """While entered, tokens that this thread runs through a compiled backbone attend so."""
    _current.context, _current.layer = context, 0
    try:
        yield
    finally:
        _current.context = None


@torch.library.custom_op("caldera::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    context: AttentionContext = _current.context
    module = SimpleNamespace(layer_idx=_current.layer)
    _current.layer += 1  # layers come in their order
    layer = AttentionLayer(module, scale, window if window >= 0 else None)
    return context.attend(layer, query, key, value)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


class _Opaque:
    """The context that the compiler sees."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        reach = -1 if layer.window is None else layer.window
        out: Tensor = torch.ops.caldera.attend(query, key, value, layer.scale, reach)
        return out


_OPAQUE = _Opaque()
Backbone = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""From tokens and positions, (1, T) each, that attend so, to hidden states (T, H)."""


def plain_backbone(module: nn.Module) -> Backbone:
    """The backbone as it is."""
    return partial(hidden_states, module)


def compiled_backbone(module: nn.Module) -> Backbone:
    """The backbone, whose layers are compiled when they are first run. `module` is changed."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CODE_FOLDER.expanduser()))
    backbone = base_module(module).base_model
    rest = [part for name in ("norm", "rotary_emb") if (part := getattr(backbone, name, None))]
    for part in [*decoder_layers(module), *rest]:
        part.forward = torch.compile(part.forward, dynamic=True)

    def run(tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        with _attending(context):
            return hidden_states(module, tokens, positions, _OPAQUE)

    return run


def copied_structure(module: nn.Module, tensors: dict[int, object]) -> nn.Module:
    """A copy for evaluation that has these tensors in the place of the module's, by their id."""
    copied = copy.deepcopy(module, tensors).eval()
    for layer in decoder_layers(copied):
        layer.__dict__.pop("forward", None)  # compiled for training, and the module's own
    return copied
