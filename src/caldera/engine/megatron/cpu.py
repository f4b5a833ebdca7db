"""Lets megatron-core run on a machine without a GPU.

Megatron asks `torch.cuda` for the current device, for streams and for random states, and writes
`device="cuda"` in a few places. While `stand_ins` is entered, these are answered for the CPU. With
a GPU nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


class _Stream:
    """A stream, or an event on one: on a CPU everything has happened when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self  # such as the event that a stream has recorded


class _OnHost(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the host."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = HOST
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            # Clipping asserts that gradients are torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*(HOST if _is_cuda(arg) else arg for arg in args), **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


STAND_INS: dict[str, Any] = {
    "current_device": lambda: HOST,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "Stream": _Stream,
    "Event": _Stream,
    "stream": lambda *_: nullcontext(),
    "get_rng_state": _random_state,
    "set_rng_state": _set_random_state,
    "manual_seed": torch.default_generator.manual_seed,
}
RANDOM = "megatron.core.tensor_parallel.random"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
IN_MEGATRON: list[tuple[str, str, Any]] = [
    (RANDOM, "_get_cuda_rng_state", _random_state),
    (RANDOM, "_set_cuda_rng_state", _set_random_state),
    (DISPATCHER, "maybe_move_tensor_to_cpu", _moved),
]


@contextmanager
def stand_ins(device: torch.device) -> Iterator[None]:
    """While entered, megatron finds the CPU where it looks for a GPU, if the device is the CPU."""
    if device.type != "cpu":
        yield
        return
    with ExitStack() as stack:
        for name, value in STAND_INS.items():
            stack.enter_context(_replaced(torch.cuda, name, value))
        for module, name, value in IN_MEGATRON:
            stack.enter_context(_replaced(import_module(module), name, value))
        stack.enter_context(_OnHost())
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    found = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, found)
