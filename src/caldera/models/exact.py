"""Arithmetic in which a token's result does not depend on what it is computed together with.

Kernels add up numbers in an order that depends on how many rows they are given, so a sampler that
decodes one token of many sequences and a trainer that runs whole ones get different bits. While
`exactness` is entered, every sum is taken in a fixed order: matrix products in tiles of one
shape, attention in blocks of keys counted from the start of the sequence, and functions that have
a vector form and a scalar form in their vector form alone. What is left, additions and products of
single numbers, is rounded the same everywhere.

On CUDA custom kernels do the same. It holds for the forward pass; gradients are those
of the ordinary kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from caldera.errors import UnsupportedError
from caldera.models.exact_kernels import (
    attention,
    in_blocks,
    linear,
    log_softmax,
    logsumexp,
    matmul,
    mean,
)
from caldera.models.exact_norm import fuse_norms, in_exactness, set_exactness
from caldera.models.forward import base_module

_MARK = "_caldera_exact"


def make_exact(module: nn.Module) -> None:
    """Let every forward pass of the module, by whomever, be exact."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 2:  # as the weights of experts have, each for its own tokens
            _refuse(f"products by {name}, which has {parameter.dim()} dimensions")
    setattr(base_module(module), _MARK, True)
    fuse_norms(module)


def is_exact(module: nn.Module) -> bool:
    return getattr(base_module(module), _MARK, False)


@contextmanager
def exactness(wanted: bool = True) -> Iterator[None]:
    """While entered, this thread computes exactly, if that is wanted."""
    if not wanted or in_exactness():
        yield
        return
    set_exactness(True)
    try:
        with _Exact():
            yield
    finally:
        set_exactness(False)


class _Exact(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTWISE:
            return in_blocks(func, *args, **kwargs)
        exact = _EXACT.get(func)
        return func(*args, **kwargs) if exact is None else exact(*args, **kwargs)


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(f"rollout.native.exact=True: no exact form of {name}, which it needs")


def _forms(*names: str) -> set[Any]:
    """Functions by these names, wherever PyTorch has them."""
    places = (torch, torch.Tensor, F)
    return {getattr(place, name) for name in names for place in places if hasattr(place, name)}


_ELEMENTWISE = _forms(
    "cos",
    "sin",
    "exp",
    "log",
    "rsqrt",
    "sigmoid",
    "tanh",
    "silu",
    "gelu",
    "softplus",
    "erf",
)
_EXACT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_forms("linear"), linear),
    **dict.fromkeys(_forms("matmul", "mm", "__matmul__"), matmul),
    **dict.fromkeys(_forms("scaled_dot_product_attention"), attention),
    **dict.fromkeys(_forms("logsumexp"), logsumexp),
    **dict.fromkeys(_forms("log_softmax"), log_softmax),
    **dict.fromkeys(_forms("mean"), mean),
    **{
        function: partial(_refuse, name)
        for name in ("bmm", "addmm", "baddbmm", "einsum", "conv1d")
        for function in _forms(name)
    },
}
