"""Liger's kernels, where liger-kernel is installed."""

from __future__ import annotations

import importlib
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.models.forward import base_module


def apply_liger(module: nn.Module, key: str) -> None:
    """Let the backbone compute norms, rotary embeddings and gated layers with Liger's kernels.

    Its losses are left out: log-probs come from this package's own head. The library replaces
    classes and functions of the model's family, so models that are built later have them too.
    """
    try:
        library = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ConfigError(
            f"{key}.use_liger=true needs liger-kernel: {install_command('liger')}"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(f"{key}.use_liger=true needs a CUDA device, and there is none")
    backbone = cast(PreTrainedModel, base_module(module).base_model)
    family = backbone.config.model_type
    known = library.MODEL_TYPE_TO_APPLY_LIGER_FN
    if family not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{key}.use_liger=true: takes one of {names}, not a {family!r} model")
    try:
        library._apply_liger_kernel_to_instance(
            backbone, cross_entropy=False, fused_linear_cross_entropy=False
        )
    except TypeError as error:  # of a known family, but not of a class that it patches
        raise ConfigError(f"{key}.use_liger=true: {error}") from error
