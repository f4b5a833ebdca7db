"""The floating-point format in which a shared module samples."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from caldera.models.forward import base_module


def sampling_dtype(module: nn.Module, name: str | None, device: torch.device) -> torch.dtype:
    """What `rollout.dtype` asks for; null: the parameters' own, or bfloat16 on CUDA."""
    if name is not None:
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.bfloat16 if device.type == "cuda" else _parameter_dtype(module)


def sampling_precision(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[object]:
    """To be entered around all of a sampling, so that parameters of another dtype are cast once."""
    if dtype == _parameter_dtype(module):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def _parameter_dtype(module: nn.Module) -> torch.dtype:
    return next(base_module(module).parameters()).dtype
