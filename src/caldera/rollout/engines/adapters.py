"""A LoRA adapter on its way to an engine: a folder in peft's format, in shared memory."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from caldera.errors import RolloutError
from caldera.models.adapters import ADAPTER, adapted_layers, saved_name
from caldera.models.forward import base_module
from caldera.rollout.engines.files import SHARED_MEMORY
from caldera.rollout.engines.host.caldera_engine.buckets import (
    ADAPTER_FILE,
    Adapter,
    file_checksum,
)
from caldera.rollout.engines.options import KEY
from caldera.storage.folders import own_folder

LARGEST_RANK = 512
"""That vLLM has kernels for."""
BESIDE = {"q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""SGLang has some layers as one, and takes adapters of these only beside those of others."""
OF_SGLANG = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")
"""Layers of dense models, which SGLang finds by these names."""


@dataclass(frozen=True)
class AdapterShape:
    """What an engine must know of an adapter before it comes."""

    rank: int
    """The largest of all layers."""
    targets: list[str]
    """Names of layers, without the path to them."""
    settings: dict[str, Any]
    """Content of adapter_config.json."""


def adapter_shape(module: nn.Module) -> AdapterShape | None:
    """Of a module's adapter; None if it has none."""
    layers = adapted_layers(base_module(module))
    if not layers:
        return None
    lora: Any = module.peft_config[ADAPTER]  # type: ignore[index]
    targets = sorted({name.rpartition(".")[2] for name in layers})
    ranks = [lora.r, *lora.rank_pattern.values()]
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": targets,
        "r": lora.r, "lora_alpha": lora.lora_alpha, "use_rslora": lora.use_rslora,
        "rank_pattern": dict(lora.rank_pattern), "alpha_pattern": dict(lora.alpha_pattern),
    }  # fmt: skip
    return AdapterShape(max(ranks), targets, settings)


def why_merged(name: str, module: nn.Module, device: torch.device) -> str | None:
    """Why an engine cannot have a module's adapter as such; None if it can."""
    if any(".modules_to_save." in each for each, _ in module.named_parameters()):
        return "whole layers are trained with it"
    for layer in adapted_layers(base_module(module)).values():
        if ADAPTER in layer.lora_embedding_A or layer.fan_in_fan_out:
            return "it adapts other layers than linear ones"
    shape = adapter_shape(module)
    if shape is None:
        return None
    if name == "sglang":
        return _why_not_sglang(module, shape, device)
    if shape.rank > LARGEST_RANK:
        return f"its rank is {shape.rank}, and vLLM takes {LARGEST_RANK} at most"
    return None


def _why_not_sglang(module: nn.Module, shape: AdapterShape, device: torch.device) -> str | None:
    if device.type != "cpu":
        return "Caldera brings adapters to SGLang on CPUs alone"
    if any(shape.settings[key] for key in ("use_rslora", "rank_pattern", "alpha_pattern")):
        return "SGLang scales every layer by lora_alpha / lora_rank"
    layers = adapted_layers(base_module(module))
    has_keys = any(layer.endswith(".k_proj") for layer in layers)
    for layer in layers:
        if not OF_SGLANG.fullmatch(layer):
            return f"SGLang may not know {layer} by that name"
        block, _, own = layer.rpartition(".")
        needed = BESIDE.get(own)
        if needed is not None and f"{block}.{needed}" not in layers:
            return f"SGLang takes {layer} only beside {needed}"
        if own == "q_proj" and has_keys and f"{block}.k_proj" not in layers:
            return f"SGLang takes {layer} only beside k_proj, as others have it"
    return None


@contextmanager
def told_of_merging(engine: str | None) -> Iterator[None]:
    """If an `engine` that has an adapter fails, the error says how to do without."""
    try:
        yield
    except (RolloutError, RuntimeError, ValueError) as error:
        if engine is None:
            raise
        raise RolloutError(
            f"{error}\nIf it is the LoRA adapter that {engine} cannot have: "
            f"{KEY}.engine_kwargs.{engine}.enable_lora=False merges it into the weights"
        ) from error


class AdapterFolders:
    """The newest adapter: an engine that was started anew reads it again."""

    def __init__(self, engine: str, shape: AdapterShape, root: Path = SHARED_MEMORY) -> None:
        self.engine = engine
        """Whose adapter it is: vllm or sglang."""
        self._shape = shape
        self._root = own_folder("caldera-adapter", root)
        self._remove = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._count = 0
        self.newest: Adapter | None = None

    def write(self, weights: dict[str, Tensor]) -> None:
        """Replace the adapter by these tensors, which have peft's names."""
        self.clear()
        folder = self._root / str(self._count)
        self._count += 1
        folder.mkdir()
        config = json.dumps(self._shape.settings)
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        # contiguous and apart, as safetensors takes them
        own = {saved_name(name): weight.detach().cpu().clone() for name, weight in weights.items()}
        file = folder / ADAPTER_FILE
        save_file(own, file)
        self.newest = {"path": str(folder), "checksum": file_checksum(str(file))}

    def clear(self) -> None:
        """There is none any more."""
        if self.newest is not None:
            shutil.rmtree(self.newest["path"])
        self.newest = None

    def close(self) -> None:
        self._remove()
