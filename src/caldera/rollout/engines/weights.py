"""What engines are to compute with, and which of them have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from caldera.models.loading import exported_weights
from caldera.rollout.engines.adapters import AdapterFolders, told_of_merging
from caldera.rollout.engines.cuda_ipc import CudaBuckets
from caldera.rollout.engines.files import NamedWeights, WeightFiles
from caldera.rollout.engines.host.caldera_engine.base import SteppedEngine


class WeightSource(Protocol):
    """Whoever has the weights; a training engine is one."""

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
        self, engines: int, files: WeightFiles, adapters: AdapterFolders | None = None,
        cuda: CudaBuckets | None = None,
    ) -> None:  # fmt: skip
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
            with told_of_merging(self._adapters.engine):
                engine.use_weights(version, self._adapters.newest)
        self.lacking.discard(place)

    def close(self) -> None:
        self._files.close()
        if self._adapters is not None:
            self._adapters.close()

    def _write(self, stream: NamedWeights) -> None:
        self._source = None
        self._files.write(stream)
