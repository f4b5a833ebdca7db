"""The layout in which every rank has the whole model on its device, CPU or GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from caldera.config import FSDPConfig, OptimizerConfig
from caldera.core_algos import LossScale
from caldera.engine.base import ENGINES, EngineOptions
from caldera.engine.layout import Layout, Ranks, prepare_module
from caldera.engine.packed_model import PackedModel
from caldera.engine.training import TrainingEngine
from caldera.errors import ConfigError
from caldera.models.flops import Arithmetic
from caldera.models.forward import move
from caldera.models.loading import DTYPES
from caldera.models.pretrained import WeightSource


class LocalLayout(Layout):
    """Data parallel: ranks cut their own numbers of micro-batches, and meet before and after."""

    is_whole = True

    def __init__(self, packed: PackedModel, device: torch.device) -> None:
        self.root = self.packed = packed.to(device)
        self._ranks = Ranks(device)
        self.dp_rank, self.dp_size = self._ranks.rank, self._ranks.size

    def loss_scale(self, mask: Tensor) -> LossScale:
        return self._ranks.loss_scale(mask)

    def least_micro_batches(self, own: int) -> int:
        return own

    def finish_gradients(self) -> None:
        self._ranks.average_gradients(self.root)

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.root.parameters(), max_norm)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.packed.inner.state_dict())

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def move(self, device: torch.device) -> None:
        for tensor in (*self.root.parameters(), *self.root.buffers()):
            tensor.data = move(tensor.data, device)

    def check(self) -> None:
        self._ranks.check_alike(self.packed.inner)

    def wait(self) -> None:
        self._ranks.wait()


class LocalEngine(TrainingEngine):
    """Trains a module that is whole."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        memory: FSDPConfig,
        optim: OptimizerConfig | None,
        grad_clip: float = 0.0,
        options: EngineOptions | None = None,
    ) -> None:
        """`options` says more than the other arguments, which it replaces."""
        options = options or EngineOptions(memory, optim, grad_clip)
        prepare_module(module, options)
        memory = options.memory
        compute = DTYPES[memory.dtype or memory.model_dtype]
        autocast = None if compute == DTYPES[memory.model_dtype] else compute
        packed = PackedModel(module, autocast, options.activation_offload)
        layout = LocalLayout(packed, device)
        super().__init__(layout, Arithmetic.of(module), device, options)


@ENGINES.register("local")
def build_local(
    module: nn.Module, source: WeightSource | None, device: torch.device, options: EngineOptions
) -> LocalEngine:
    assert source is None, "a local engine is given a module with its weights"
    for key, value in {
        "ulysses_sequence_parallel_size": options.sequence_parallel,
        "fsdp_config.tensor_parallel_size": options.memory.tensor_parallel_size,
    }.items():
        if value != 1:
            raise ConfigError(f"{key}={value}: strategy=local takes 1; fsdp2 can")
    if options.memory.offload_policy:
        raise ConfigError("fsdp_config.offload_policy=True: strategy=local takes false; fsdp2 can")
    return LocalEngine(module, device, options.memory, options.optim, options=options)
