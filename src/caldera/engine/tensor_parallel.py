"""Tensor parallelism: each rank has some columns or rows of the matrices in a decoder layer.

Which, the model's own config says (`base_model_tp_plan`): a matrix whose output is cut, such as
those of queries, is followed by one whose input is cut, after which the ranks add up. What is not
in the plan, such as norms, embeddings and the head, every rank has and computes alike.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

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
    trunk = model.base_model
    prefix = f"{model.base_model_prefix}." if trunk is not model else ""
    styles: dict[str, ParallelStyle] = {}
    inside: set[str] = set()
    for name, part in trunk.named_modules():
        style = STYLES.get(_planned(plan, name))
        if style is not None and isinstance(part, nn.Linear):
            styles[name] = style()
            inside.add(name.rpartition(".")[0])
    if not styles:
        raise UnsupportedError(f"{KEY}={mesh.size()}: {type(model).__name__} names no matrices")
    parallelize_module(trunk, mesh, styles)
    dimensions, partial = {}, set()
    for name, parameter in trunk.named_parameters():
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
