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
from caldera.models.pretrained import WeightSource


def require_megatron(asked: str) -> None:
    """megatron-core is installed here; else an error that names the key which asks for it."""
    find = importlib.util.find_spec
    if find("megatron") is None or find("megatron.core") is None:  # others share the name
        raise ConfigError(f"{asked} needs megatron-core: {install_command('megatron')}")


@ENGINES.register("megatron")
def build_megatron(
    module: nn.Module, source: WeightSource | None, device: torch.device, options: EngineOptions
) -> Engine:
    assert source is not None, "a sharded engine is given a module without weights"
    require_megatron("strategy=megatron")
    # Megatron calls functions of torch by names that these are about to lose.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.")
    with warnings.catch_warnings():
        # Of libraries that would be faster on a GPU, and that are not needed.
        warnings.simplefilter("ignore")
        from caldera.engine.megatron.engine import MegatronEngine

        return MegatronEngine(module, source, device, options)
