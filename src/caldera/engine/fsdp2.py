"""The engine `fsdp2`: PyTorch's fully_shard, with tensor parallelism inside a node."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from caldera.engine.base import ENGINES, EngineOptions
from caldera.engine.layout import prepare_module, strip
from caldera.engine.packed_model import PREFIX, PackedModel
from caldera.engine.sharded import (
    Meshes,
    ShardedLayout,
    compute_dtype,
    make_meshes,
    precise_head,
    units,
)
from caldera.engine.training import TrainingEngine
from caldera.errors import ConfigError, UnsupportedError
from caldera.models.flops import Arithmetic
from caldera.models.forward import base_module
from caldera.models.pretrained import WeightSource
from caldera.models.support import rope_kind

# It tells on every gathering that rows which are cut twice take two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

KEY = "fsdp_config.tensor_parallel_size"
STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


@dataclass(frozen=True)
class Cut:
    """The ranks that share matrices, and which dimension of a parameter is cut."""

    mesh: DeviceMesh
    dimensions: dict[str, int]
    """By the parameter's name; what is missing is whole."""
    partial: frozenset[str]
    """Whole parameters that are used between two cut matrices: each rank has a part of their
    gradient, that of its heads."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        if name not in self.dimensions:
            return whole
        return whole.chunk(self.mesh.size(), self.dimensions[name])[self.mesh.get_local_rank()]

    def add_up(self, name: str, gradient: Tensor) -> None:
        """Give every rank the gradient of all."""
        if name in self.partial:
            dist.all_reduce(gradient, group=self.mesh.get_group())


def cut_matrices(module: nn.Module, mesh: DeviceMesh) -> Cut:
    """Cut the matrices of the module in place; names are those of the module's parameters."""
    model = base_module(module)
    if model is not module:
        raise UnsupportedError(f"{KEY}={mesh.size()} with a LoRA adapter: takes 1")
    _check_heads(model.config, mesh.size())
    plan: dict[str, str] = dict(getattr(model.config, "base_model_tp_plan", None) or {})
    backbone = model.base_model
    prefix = f"{model.base_model_prefix}." if backbone is not model else ""
    styles: dict[str, ParallelStyle] = {}
    inside: set[str] = set()
    for name, part in backbone.named_modules():
        style = STYLES.get(_planned(plan, name))
        if style is not None and isinstance(part, nn.Linear):
            styles[name] = style()
            inside.add(name.rpartition(".")[0])
    if not styles:
        raise UnsupportedError(f"{KEY}={mesh.size()}: {type(model).__name__} names no matrices")
    parallelize_module(backbone, mesh, styles)
    dimensions, partial = {}, set()
    for name, parameter in backbone.named_parameters():
        if isinstance(parameter, DTensor):
            placement = parameter.placements[0]
            if placement.is_shard():
                dimensions[prefix + name] = placement.dim  # type: ignore[attr-defined]
        elif any(name.startswith(f"{block}.") for block in inside):
            partial.add(prefix + name)
    return Cut(mesh, dimensions, frozenset(partial))


def _planned(plan: dict[str, str], name: str) -> str:
    """The plan's word for a module, whose name has numbers where the plan has stars."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", name), "")


def _check_heads(config: object, ranks: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, key, None)
        if value is not None and value % ranks:
            raise ConfigError(f"{KEY}={ranks} does not divide the model's {key}={value}")


HOST = torch.device("cpu")


class Fsdp2Layout(ShardedLayout):
    def __init__(
        self,
        packed: PackedModel,
        source: WeightSource,
        meshes: Meshes,
        cut: Cut | None,
        device: torch.device,
        options: EngineOptions,
    ) -> None:
        super().__init__(packed, meshes, device)
        self._cut = cut
        self._stays_on_host = options.memory.offload_policy
        self.root = packed
        _shard(packed, meshes, device, options)
        self._fill(source)

    def finish_gradients(self) -> None:
        if self._cut is not None:
            for name, parameter in self.packed.inner.named_parameters():
                if parameter.grad is not None:
                    self._cut.add_up(name, _local(parameter.grad))

    def clip(self, max_norm: float) -> Tensor:
        gradients = [p.grad for p in self.root.parameters() if p.grad is not None]
        norm = _norm(gradients, self._device)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        local = [_local(gradient) for gradient in gradients]
        if local:
            torch._foreach_mul_(local, factor.to(local[0].device))
        return norm

    def rest(self) -> None:
        for part in self.packed.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def move(self, device: torch.device) -> None:
        if not self._stays_on_host:
            self.rest()
            self.packed.to(device)

    def _fill(self, source: WeightSource) -> None:
        """Give the parameters their values: one whole tensor at a time, of which a part is kept."""
        shards = self._meshes.sharding
        place, count = shards.get_local_rank(-1), shards.size(-1)
        home = HOST if self._stays_on_host else self._device
        values: dict[str, nn.Parameter] = {}
        made: dict[int, nn.Parameter] = {}  # tied weights stay tied
        for name, parameter in self.packed.named_parameters(remove_duplicate=False):
            assert isinstance(parameter, DTensor)
            if id(parameter) in made:
                values[name] = made[id(parameter)]
                continue
            own = strip(name, PREFIX)
            part = source.tensor(own)
            if self._cut is not None:
                part = self._cut.part(own, part)
            rows = part.chunk(count)
            shard = rows[place] if place < len(rows) else part[:0]
            local = shard.to(home, copy=True).contiguous()
            whole = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            values[name] = made[id(parameter)]
        self.packed.load_state_dict(values, strict=False, assign=True)
        self.packed.to(home)  # the buffers, which come with their values
        if self._stays_on_host:
            for buffer_owner in self.packed.modules():
                for key, buffer in buffer_owner.named_buffers(recurse=False):
                    setattr(buffer_owner, key, buffer.to(self._device))


def _shard(
    packed: PackedModel, meshes: Meshes, device: torch.device, options: EngineOptions
) -> None:
    """Make the module, in place, one that gathers its parameters when they are needed."""
    memory = options.memory
    compute = compute_dtype(options)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if memory.offload_policy:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    parts = units(packed, options)
    head = precise_head(packed, options)
    for part in parts:
        fully_shard(
            part,
            mesh=meshes.sharding,
            reshard_after_forward=memory.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy() if part is head else precision,
            offload_policy=offload,
        )
    fully_shard(
        packed,
        mesh=meshes.sharding,
        reshard_after_forward=memory.reshard_after_forward,
        mp_policy=precision,
        offload_policy=offload,
    )
    if memory.forward_prefetch:
        for before, after in pairwise(parts):
            before.set_modules_to_forward_prefetch([after])  # type: ignore[operator]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The norm of all gradients, whatever meshes their parameters lie on."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_groups[_groups_that_share(gradient)].append(_local(gradient))
    total = torch.zeros((), device=device)
    for groups, local in by_groups.items():
        norms = torch.stack(torch._foreach_norm(local, dtype=torch.float32))
        square = norms.to(device).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def _groups_that_share(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Ranks that have different parts of the gradient, by dimension of the mesh."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(number)
        for number, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )


@ENGINES.register("fsdp2")
def build_fsdp2(
    module: nn.Module, source: WeightSource | None, device: torch.device, options: EngineOptions
) -> TrainingEngine:
    assert source is not None, "a sharded engine is given a module without weights"
    meshes = make_meshes(device, options, rope_kind(module))
    arithmetic = Arithmetic.of(module)
    cut = cut_matrices(module, meshes.matrices) if meshes.matrices is not None else None
    prepare_module(module, options)
    packed = PackedModel(module, offloads=options.activation_offload)
    layout = Fsdp2Layout(packed, source, meshes, cut, device, options)
    return TrainingEngine(layout, arithmetic, device, options)
