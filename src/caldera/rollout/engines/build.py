"""`rollout.name=vllm` and `rollout.name=sglang`: engines with the keys of the config."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from caldera.config.samplers import KEY, SAMPLERS
from caldera.errors import UnsupportedError
from caldera.models.forward import base_module
from caldera.rollout.base import ROLLOUTS
from caldera.rollout.engines.host.caldera_engine.base import SteppedEngine
from caldera.rollout.engines.options import (
    MEGABYTE,
    engine_arguments,
    engine_environment,
    reseeded,
)
from caldera.rollout.engines.process import EngineProcess, EngineRanks
from caldera.rollout.engines.rollout import EngineRollout
from caldera.rollout.engines.weights import (
    AdapterFolders,
    AdapterShape,
    CudaBuckets,
    EngineWeights,
    NoFiles,
    WeightFiles,
    adapter_shape,
    told_of_merging,
    why_merged,
)
from caldera.rollout.weights import sampling_dtype
from caldera.storage.locks import own_folder

if TYPE_CHECKING:
    from caldera.config import RolloutConfig

logger = logging.getLogger(__name__)


# ---- From Caldera's keys to the arguments of an engine


class _ConfiguredEngine(EngineRollout):
    """Engines as the config asks for them. The module may be sharded: its config alone is used, and
    its weights if nobody brings others."""

    engine: ClassVar[str]

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        name = self.engine
        if config.engine_python is None:
            _require(name)
        dtype = sampling_dtype(module, config.dtype, device)
        folder = own_folder("caldera-model", Path(tempfile.gettempdir()))
        _write_config(module, folder)
        adapter = _adapter(name, config, module, device)
        ranks = EngineRanks.join(config.tensor_model_parallel_size, device)
        arguments = engine_arguments(name, config, str(folder), _devices(device, ranks), adapter)
        arguments["dtype"] = str(dtype).removeprefix("torch.")
        engines: list[SteppedEngine] = []
        if ranks is None or ranks.leads:
            with told_of_merging(None if adapter is None else name):
                engines = _start(name, config, arguments, device, ranks)
        adapters = None if adapter is None else AdapterFolders(name, adapter)
        weights = _weights(config, dtype, device, engines, adapters, ranks)
        super().__init__(name, config, module, device, engines, weights, dtype, folder, ranks)


@ROLLOUTS.register("vllm")
class VllmRollout(_ConfiguredEngine):
    """Samples with vLLM."""

    engine = "vllm"
    traits = SAMPLERS[engine]


@ROLLOUTS.register("sglang")
class SglangRollout(_ConfiguredEngine):
    """Samples with SGLang."""

    engine = "sglang"
    traits = SAMPLERS[engine]


def _devices(device: torch.device, ranks: EngineRanks | None) -> int | None:
    """How many GPUs an engine can have; None: it runs on the CPU."""
    if device.type == "cpu":
        return None
    return torch.cuda.device_count() if ranks is None else len(ranks.devices)


def _start(
    name: str,
    config: RolloutConfig,
    arguments: dict[str, Any],
    device: torch.device,
    ranks: EngineRanks | None,
) -> list[SteppedEngine]:
    environment = engine_environment(name, config, device)
    python = config.engine_python
    alone = ranks is None and config.data_parallel_size == 1
    if python is None and name == "vllm" and alone:
        os.environ.update({key: os.environ.get(key, value) for key, value in environment.items()})
        return [_in_this_process(arguments)]
    # SGLang, when it is shut down, ends every child of the process that it is in.
    path = sys.executable if python is None else os.path.expanduser(python)
    rank = int(os.environ.get("RANK", "0"))

    devices = [] if ranks is None else ranks.devices

    def start(replica: int) -> SteppedEngine:
        seeded = reseeded(name, arguments, rank, replica)
        return EngineProcess(path, name, seeded, environment, devices)

    # vLLM measures free memory while it starts: on a GPU each waits for the one before.
    at_once = 1 if device.type == "cuda" else config.data_parallel_size
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(start, range(config.data_parallel_size)))


def _adapter(
    name: str, config: RolloutConfig, module: nn.Module, device: torch.device
) -> AdapterShape | None:
    """The engine's adapter; None if there is none, or it comes merged."""
    shape = adapter_shape(module)
    if shape is None:
        return None
    if (config.engine_kwargs.get(name) or {}).get("enable_lora") is False:
        why: str | None = f"{KEY}.engine_kwargs.{name}.enable_lora=False"
    else:
        why = why_merged(name, module, device)
    if why is not None:
        logger.info("%s gets the adapter merged into the weights: %s", name, why)
        return None
    return shape


def _weights(
    config: RolloutConfig,
    dtype: torch.dtype,
    device: torch.device,
    engines: list[SteppedEngine],
    adapters: AdapterFolders | None,
    ranks: EngineRanks | None,
) -> EngineWeights:
    bucket = config.checkpoint_engine.update_weights_bucket_megabytes * MEGABYTE
    # The format of a memory handle is that of one version of torch.
    builds = {each.torch_version if isinstance(each, EngineProcess) else "" for each in engines}
    shares_gpu = device.type == "cuda" and builds == {str(torch.__version__)} and ranks is None
    files = WeightFiles if engines else NoFiles
    return EngineWeights(
        len(engines),
        files(dtype, bucket),
        adapters,
        CudaBuckets(dtype, bucket, device) if shares_gpu else None,
    )


def _require(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UnsupportedError(
            f"{KEY}.name={name!r}: this Python has no {name}. Install it, or name a Python that "
            f"has it: {KEY}.engine_python=/path/to/python (scripts/engine_venv.py makes one)"
        )


def _in_this_process(arguments: dict[str, Any]) -> SteppedEngine:
    from caldera.rollout.engines.host.caldera_engine.vllm_engine import VllmEngine

    return VllmEngine(arguments)


def _write_config(module: nn.Module, folder: Path) -> None:
    """The sizes of the model that an engine needs. Requests bring their own stop tokens."""
    base_module(module).config.save_pretrained(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, "eos_token_id": None}), encoding="utf-8")
