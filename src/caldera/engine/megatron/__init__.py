"""strategy=megatron: megatron-core's parallel layers, schedules and optimiser.

Only files in this folder import megatron-core, and only once an engine is built.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import nn

from caldera.engine.base import ENGINES, Engine, EngineOptions
from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.models.fresh import WeightSource


@ENGINES.register("megatron")
def build_megatron(
    module: nn.Module, source: WeightSource | None, device: torch.device, options: EngineOptions
) -> Engine:
    assert source is not None, "a sharded engine is given a module without weights"
    has_megatron = importlib.util.find_spec("megatron") is not None  # others share the name
    if not (has_megatron and importlib.util.find_spec("megatron.core")):
        raise ConfigError(f"strategy=megatron needs megatron-core: {install_command('megatron')}")
    # Megatron calls functions of torch by names that these are about to lose.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.")
    with warnings.catch_warnings():
        # Of libraries that would be faster on a GPU, and that are not needed.
        warnings.simplefilter("ignore")
        from caldera.engine.megatron.engine import MegatronEngine

        return MegatronEngine(module, source, device, options)
