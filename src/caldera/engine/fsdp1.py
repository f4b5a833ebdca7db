"""strategy=fsdp: PyTorch's FullyShardedDataParallel. The parameters of a part are one flat tensor,
of which every rank has a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard
from torch.distributed.fsdp.wrap import CustomPolicy

from caldera.engine.base import ENGINES, EngineOptions
from caldera.engine.packed_model import PREFIX, PackedModel
from caldera.engine.sharded import ShardedEngine, precise_head, units
from caldera.engine.training import compute_dtype
from caldera.errors import ConfigError
from caldera.models.forward import base_module, decoder_layers
from caldera.models.pretrained import WeightSource


@ENGINES.register("fsdp")
class Fsdp1Engine(ShardedEngine):
    root: FullyShardedDataParallel

    def __init__(
        self,
        module: nn.Module,
        source: WeightSource | None,
        device: torch.device,
        options: EngineOptions,
    ) -> None:
        memory = options.memory
        for key, value, takes in (
            ("offload_policy", memory.offload_policy, False),
            ("tensor_parallel_size", memory.tensor_parallel_size, 1),
        ):
            if value != takes:
                raise ConfigError(
                    f"fsdp_config.{key}={value}: strategy=fsdp takes {takes}; fsdp2 can"
                )
        if len({parameter.dtype for parameter in decoder_layers(module)[0].parameters()}) > 1:
            raise ConfigError(
                f"fsdp_config.model_dtype={memory.model_dtype}: with a LoRA adapter, which is "
                "float32, strategy=fsdp takes fp32; fsdp2 can"
            )
        if memory.fsdp_size == 1:
            raise ConfigError(
                "fsdp_config.fsdp_size=1: nothing is sharded; strategy=local does that"
            )
        super().__init__(module, source, device, options)

    def _lay_out(self, options: EngineOptions) -> nn.Module:
        packed, memory, sharding = self.packed, options.memory, self._sharding
        has_adapter = base_module(self.module) is not self.module
        full, grads = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        if sharding.ndim == 2:
            full, grads = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
        parts = set(units(packed, options))
        head = precise_head(packed, options)
        compute = compute_dtype(options)
        precision = None if compute is None else MixedPrecision(compute, torch.float32)

        def wraps(part: nn.Module) -> bool | dict[str, Any]:
            return {"mixed_precision": None} if part is head else part in parts

        root = FullyShardedDataParallel(
            packed,
            device_mesh=sharding,
            sharding_strategy=full if memory.reshard_after_forward else grads,
            auto_wrap_policy=CustomPolicy(wraps),
            mixed_precision=precision,
            param_init_fn=_filler(packed, self._source),
            device_id=torch.cuda.current_device() if self.device.type == "cuda" else self.device,
            forward_prefetch=memory.forward_prefetch,
            # Parameters that are trained and others that are not cannot be one flat tensor, and
            # layers whose parameters are one are not compiled.
            use_orig_params=memory.use_orig_params or has_adapter or options.compiles,
        )
        # FSDP leaves this to the first forward pass, but parameters can be offloaded before it.
        _lazy_init(root, root)
        return root

    def _clip(self, max_norm: float) -> Tensor:
        return self.root.clip_grad_norm_(max_norm)

    def rest(self) -> None:
        for part in FullyShardedDataParallel.fsdp_modules(self.root):
            if part._handle is not None:
                _reshard(part, part._handle, True)

    def _move(self, device: torch.device) -> None:
        self.rest()
        for part in FullyShardedDataParallel.fsdp_modules(self.root):
            handle = part._handle
            if handle is not None:
                handle.flat_param_to(device, non_blocking=device.type == "cuda")
                handle.flat_param._local_shard = handle.flat_param.data


def _filler(packed: PackedModel, source: WeightSource) -> Callable[[nn.Module], None]:
    """Gives a module the values of its own parameters when FSDP is about to cut them."""
    names = {id(module): name for name, module in packed.named_modules()}
    made: dict[int, nn.Parameter] = {}  # tied weights stay tied

    def fill(module: nn.Module) -> None:
        for key, empty in list(module._parameters.items()):
            if empty is None or not empty.is_meta:
                continue
            if id(empty) not in made:
                name = f"{names[id(module)]}.{key}".removeprefix(PREFIX)
                made[id(empty)] = nn.Parameter(source.tensor(name), empty.requires_grad)
            module._parameters[key] = made[id(empty)]

    return fill
