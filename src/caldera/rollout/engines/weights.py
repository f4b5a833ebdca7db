"""The weights of engines, and which engines have them."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from caldera.config.samplers import KEY
from caldera.errors import RolloutError
from caldera.models.adapters import ADAPTER, adapted_layers, saved_name
from caldera.models.forward import base_module
from caldera.models.loading import exported_weights
from caldera.rollout.engines.host.caldera_engine.base import SteppedEngine
from caldera.rollout.engines.host.caldera_engine.buckets import (
    ADAPTER_FILE,
    ALIGNMENT,
    Adapter,
    Bucket,
    checksum,
    file_checksum,
    map_file,
)
from caldera.storage.locks import own_folder

# ---- Weights on their way to an engine: files of shared memory, a bucket in each

SHARED_MEMORY = Path("/dev/shm")

NamedWeights = Iterable[tuple[str, Tensor]]


class WeightFiles:
    """The newest weights, all of them: an engine that was started anew reads them again."""

    def __init__(self, dtype: torch.dtype, bucket_bytes: int, root: Path = SHARED_MEMORY) -> None:
        """Weights are kept in `dtype`; a file has `bucket_bytes`, or one tensor that is larger."""
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._folder = own_folder("caldera-weights", root)
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.buckets: list[Bucket] = []

    def write(self, stream: NamedWeights) -> None:
        """Replace all weights by those of the stream."""
        self.clear()
        for weights, size in in_buckets(stream, self._dtype, self._bucket_bytes):
            self.buckets.append(self._bucket(weights, size))

    def clear(self) -> None:
        """Give the memory back."""
        for file in self._folder.iterdir():
            file.unlink()
        self.buckets = []

    def push(self, engine: SteppedEngine) -> None:
        """Have the engine read them all."""
        for place, bucket in enumerate(self.buckets):
            engine.load_bucket(bucket, place == 0)

    def close(self) -> None:
        self._remove()

    def _bucket(self, weights: list[tuple[str, Tensor]], size: int) -> Bucket:
        path = self._folder / f"{len(self.buckets):05d}"
        _allocate(path, size)
        memory = map_file(str(path), size)
        entries = fill(memory, weights, self._dtype)
        return {
            "path": str(path),
            "bytes": size,
            "checksum": checksum(memory),
            "entries": entries,
        }


def in_buckets(
    stream: NamedWeights, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[tuple[list[tuple[str, Tensor]], int]]:
    """Weights that fit a bucket together, or one that does not, and the bytes that they take."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in stream:
        own = _aligned(weight.numel() * dtype.itemsize)
        if waiting and size + own > bucket_bytes:
            yield waiting, size
            waiting, size = [], 0
        waiting.append((name, weight))
        size += own
    if waiting:
        yield waiting, size


def fill(memory: Tensor, weights: list[tuple[str, Tensor]], dtype: torch.dtype) -> list[list[Any]]:
    """Copy weights into memory (bytes,), one behind the other; returns a bucket's entries."""
    entries, offset = [], 0
    with torch.no_grad():
        for name, weight in weights:
            length = weight.numel() * dtype.itemsize
            place = memory[offset : offset + length].view(dtype)
            place.view(weight.shape).copy_(weight)
            entries.append([name, str(dtype).removeprefix("torch."), list(weight.shape), offset])
            offset += _aligned(length)
    return entries


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _allocate(path: Path, size: int) -> None:
    """Reserve the memory now: a write into memory that is not there would end the process."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise RolloutError(
                f"{path.parent} has no room for {size} bytes of weights: {error.strerror}. "
                "Engines take weights from shared memory, which must hold the whole model; "
                "containers have more of it with --shm-size"
            ) from error


# ---- Weights on their way to an engine on the same GPU: one buffer there, filled again and again


class CudaBuckets:
    """Pushes weights bucket by bucket; nothing of them is kept."""

    def __init__(self, dtype: torch.dtype, bucket_bytes: int, device: torch.device) -> None:
        """Weights go over in `dtype`; a bucket has `bucket_bytes`, or one tensor that is larger."""
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._device = device

    def push(self, stream: NamedWeights, engine: SteppedEngine) -> None:
        """Have an engine of another process read all weights of the stream, which may be on any
        device. The buffer is given back in the end."""
        buffer, first = torch.empty(0, dtype=torch.uint8, device=self._device), True
        for weights, size in in_buckets(stream, self._dtype, self._bucket_bytes):
            if size > len(buffer):
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            entries = fill(buffer, weights, self._dtype)
            found = checksum(buffer[:size])  # which waits until they are there
            # A handle each time: PyTorch counts them against those that were read and given back.
            handle = buffer.untyped_storage()._share_cuda_()
            bucket = {"cuda": handle, "bytes": size, "checksum": found, "entries": entries}
            engine.load_bucket(bucket, first)
            first = False
        del buffer
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # the engine needs the memory now


# ---- A LoRA adapter on its way to an engine: a folder in peft's format, in shared memory

LARGEST_RANK = 512
"""That vLLM has kernels for."""


@dataclass(frozen=True)
class AdapterShape:
    """The shape of an adapter that an engine needs before it comes."""

    rank: int
    """The largest of all layers."""
    settings: dict[str, Any]
    """Content of adapter_config.json."""


def adapter_shape(module: nn.Module) -> AdapterShape | None:
    """Of a module's adapter; None if it has none."""
    layers = adapted_layers(base_module(module))
    if not layers:
        return None
    lora: Any = module.peft_config[ADAPTER]  # type: ignore[index]
    ranks = [lora.r, *lora.rank_pattern.values()]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
    }
    return AdapterShape(max(ranks), settings)


def why_merged(name: str, module: nn.Module, shape: AdapterShape) -> str | None:
    """Why an engine cannot have a module's adapter as such; None if it can."""
    if name != "vllm":
        return "Caldera brings adapters to vLLM alone"
    if any(".modules_to_save." in each for each, _ in module.named_parameters()):
        return "whole layers are trained with it"
    for layer in adapted_layers(base_module(module)).values():
        if ADAPTER in layer.lora_embedding_A or layer.fan_in_fan_out:
            return "it adapts other layers than linear ones"
    if shape.rank > LARGEST_RANK:
        return f"its rank is {shape.rank}, and vLLM takes {LARGEST_RANK} at most"
    return None


@contextmanager
def told_of_merging() -> Iterator[None]:
    """If an engine that has an adapter fails, the error suggests how to do without."""
    try:
        yield
    except (RolloutError, RuntimeError, ValueError) as error:
        raise RolloutError(
            f"{error}\nIf it is the LoRA adapter that vllm cannot have: "
            f"{KEY}.engine_kwargs.vllm.enable_lora=False merges it into the weights"
        ) from error


class AdapterFolders:
    """The newest adapter: an engine that was started anew reads it again."""

    def __init__(self, shape: AdapterShape, root: Path = SHARED_MEMORY) -> None:
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


class WeightSource(Protocol):
    """The owner of the weights; a training engine is one."""

    is_whole: bool
    """Whether the weights can be had here at any time, and without other ranks."""

    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, adapters `merged` or left out."""

    def adapter_weights(self) -> dict[str, Tensor]:
        """The tensors of the adapter, under peft's names."""


class ModuleWeights:
    """Weights of a module that is whole."""

    is_whole = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        return exported_weights(self._module, merged=merged)

    def adapter_weights(self) -> dict[str, Tensor]:
        state = self._module.state_dict()
        return {name: tensor for name, tensor in state.items() if ".lora_" in name}


class EngineWeights:
    """Weights of the model, and an adapter if engines take it as such.

    Weights go to an engine when they have changed, and when it has lost them. With an adapter the
    model's own do not change: the adapter alone goes over then.
    """

    def __init__(
        self,
        engines: int,
        files: WeightFiles,
        adapters: AdapterFolders | None = None,
        cuda: CudaBuckets | None = None,
    ) -> None:
        """Of weights that can be had at any time nothing is kept where `cuda` can bring them."""
        self._engines = engines
        self._files = files
        self._adapters = adapters
        self._cuda = cuda
        self._source: WeightSource | None = None
        self._has_base = False  # weights that an adapter goes with, and that do not change
        self.is_empty = True
        """Whether no weights have come yet."""
        self.lacking = set(range(engines))
        """Engines that do not have the newest of all."""
        self._bare = set(range(engines))  # those of them that lack the model's own weights

    def take(self, source: WeightSource) -> None:
        """Replace all by what the source has."""
        if not self._has_base:
            if self._cuda is not None and source.is_whole:
                self._files.clear()
                self._source = source
            else:
                self._write(source.export_weights(merged=self._adapters is None))
            self._bare = set(range(self._engines))
        if self._adapters is not None:
            self._adapters.write(source.adapter_weights())
            self._has_base = True
        self.is_empty = False
        self.lacking = set(range(self._engines))

    def take_stream(self, stream: NamedWeights) -> None:
        """Replace all by weights without an adapter."""
        self._write(stream)
        if self._adapters is not None:
            self._adapters.clear()
        self.is_empty = self._has_base = False
        self.lose_all()

    def lose(self, place: int) -> None:
        """An engine has forgotten everything."""
        self.lacking.add(place)
        self._bare.add(place)

    def lose_all(self) -> None:
        for place in range(self._engines):
            self.lose(place)

    def push(self, place: int, engine: SteppedEngine, version: int) -> None:
        """Bring an engine what it lacks."""
        if place in self._bare:
            if self._source is None:
                self._files.push(engine)
            else:
                assert self._cuda is not None, "else they would be in files"
                stream = self._source.export_weights(merged=self._adapters is None)
                self._cuda.push(stream, engine)
            self._bare.discard(place)
        if self._adapters is None or self._adapters.newest is None:
            engine.use_weights(version, None)
        else:
            with told_of_merging():
                engine.use_weights(version, self._adapters.newest)
        self.lacking.discard(place)

    def close(self) -> None:
        self._files.close()
        if self._adapters is not None:
            self._adapters.close()

    def _write(self, stream: NamedWeights) -> None:
        self._source = None
        if self._engines:
            self._files.write(stream)
        else:  # they are another rank's: weights that ranks gather together pass by
            for _ in stream:
                pass
