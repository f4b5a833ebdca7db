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
from caldera.engine.packed_model import PREFIX
from caldera.engine.sharded import ShardedEngine, precise_head, units
from caldera.engine.training import compute_dtype
from caldera.errors import ConfigError, UnsupportedError
from caldera.models.forward import base_module

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


@ENGINES.register("fsdp2")
class Fsdp2Engine(ShardedEngine):
    _cut: Cut | None = None

    def _cut_matrices(self) -> None:
        if self._matrices is not None:
            self._cut = cut_matrices(self.module, self._matrices)

    def _lay_out(self, options: EngineOptions) -> nn.Module:
        """The module, in place, gathers its parameters when they are needed."""
        memory = options.memory
        policy = MixedPrecisionPolicy(compute_dtype(options), torch.float32)
        pinned = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        parts = units(self.packed, options)
        head = precise_head(self.packed, options)
        for part in (*parts, self.packed):
            fully_shard(
                part,
                mesh=self._sharding,
                reshard_after_forward=memory.reshard_after_forward,
                mp_policy=MixedPrecisionPolicy() if part is head else policy,
                offload_policy=pinned if memory.offload_policy else OffloadPolicy(),
            )
        if memory.forward_prefetch:
            for before, after in pairwise(parts):
                before.set_modules_to_forward_prefetch([after])  # type: ignore[operator]
        self._fill()
        return self.packed

    def _finish_gradients(self) -> None:
        if self._cut is not None:
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    self._cut.add_up(name, _local(parameter.grad))

    def _clip(self, max_norm: float) -> Tensor:
        gradients = [p.grad for p in self.root.parameters() if p.grad is not None]
        norm = _norm(gradients, self.device)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        local = [_local(gradient) for gradient in gradients]
        if local:
            torch._foreach_mul_(local, factor.to(local[0].device))
        return norm

    def rest(self) -> None:
        for part in self.packed.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _move(self, device: torch.device) -> None:
        if not self._memory.offload_policy:
            self.rest()
            self.packed.to(device)

    def _fill(self) -> None:
        """Give the parameters their values: one whole tensor at a time, of which a part is kept."""
        shards = self._sharding
        place, count = shards.get_local_rank(-1), shards.size(-1)
        home = HOST if self._memory.offload_policy else self.device
        values: dict[str, nn.Parameter] = {}
        made: dict[int, nn.Parameter] = {}  # tied weights stay tied
        for name, parameter in self.packed.named_parameters(remove_duplicate=False):
            assert isinstance(parameter, DTensor)
            if id(parameter) in made:
                values[name] = made[id(parameter)]
                continue
            own = name.removeprefix(PREFIX)
            part = self._source.tensor(own)
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
        if self._memory.offload_policy:
            for buffer_owner in self.packed.modules():
                for key, buffer in buffer_owner.named_buffers(recurse=False):
                    setattr(buffer_owner, key, buffer.to(self.device))


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
