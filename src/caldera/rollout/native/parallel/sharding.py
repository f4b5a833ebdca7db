"""A rank's part of a model that several ranks run together: some rows or columns of its matrices.

The model's own config names them (`base_model_tp_plan`): a matrix whose output is cut, such as
those of queries, is followed by one whose input is cut, after which the ranks add up. Embedding,
norms and head are whole on every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from caldera.errors import UnsupportedError
from caldera.models.forward import base_module

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
OUTPUT_CUT, INPUT_CUT = "colwise", "rowwise"
WHOLE = "replicated_with_grad_allreduce"
"""Whole on every rank; only training has to do something about it."""
DIVIDED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
OTHERS = "or actor_rollout_ref.rollout.name=vllm or sglang"

_groups: dict[str, dist.ProcessGroup] = {}


@torch.library.custom_op("caldera::add_up", mutates_args=())
def _add_up(values: Tensor, group: str) -> Tensor:
    """The sum over the ranks of a group. Opaque to the compiler; NCCL's can be captured."""
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_groups[group])
    return total


@_add_up.register_fake
def _(values: Tensor, group: str) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


class AddedLinear(nn.Linear):
    """A matrix whose input is cut: the ranks add up what each makes of its part."""

    def __init__(self, whole: nn.Linear, ranks: int, group: str) -> None:
        """`group` is a name: the layer can be copied, and a process group cannot."""
        super().__init__(
            whole.in_features // ranks,
            whole.out_features,
            whole.bias is not None,
            device="meta",
            dtype=whole.weight.dtype,
        )
        self._group = group

    def forward(self, values: Tensor) -> Tensor:
        total: Tensor = torch.ops.caldera.add_up(F.linear(values, self.weight), self._group)
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True)
class Shard:
    """Which part of each parameter a rank has."""

    rank: int
    ranks: int
    dimensions: dict[str, int]
    """The dimension that is cut, by the parameter's name; what is missing is whole."""

    def parts(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of whole weights, as they pass by."""
        for name, whole in stream:
            if name in self.dimensions:
                yield name, whole.chunk(self.ranks, self.dimensions[name])[self.rank]
            else:
                yield name, whole


def shard_module(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> Shard:
    """Make a module on the meta device this rank's part; its parameters have no values yet."""
    model, ranks = base_module(module), group.size()
    names = planned_layers(model, ranks)
    _groups[group.group_name] = group
    dimensions = {}
    for name, style in names.items():
        whole = model.get_submodule(name)
        assert isinstance(whole, nn.Linear), "a plan is checked"
        owner, _, leaf = name.rpartition(".")
        part = _part(whole, style, ranks, group.group_name)
        setattr(model.get_submodule(owner), leaf, part)
        dimensions[f"{name}.weight"] = 0 if style == OUTPUT_CUT else 1
        if style == OUTPUT_CUT and whole.bias is not None:
            dimensions[f"{name}.bias"] = 0
    _place(model, device)
    return Shard(group.rank(), ranks, dimensions)


def planned_layers(module: nn.Module, ranks: int) -> dict[str, str]:
    """The linear layers that are cut, and how; or why so many ranks cannot share the model."""
    model = base_module(module)
    check_sizes(model, ranks)
    plan: dict[str, str] = dict(getattr(model.config, "base_model_tp_plan", None) or {})
    backbone = model.base_model
    prefix = f"{model.base_model_prefix}." if backbone is not model else ""
    parts = dict(backbone.named_modules()) | dict(backbone.named_parameters())
    found = {}
    for name, part in parts.items():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name), WHOLE)
        if style == WHOLE:
            continue
        if style not in (OUTPUT_CUT, INPUT_CUT) or type(part) is not nn.Linear:
            raise UnsupportedError(
                f"{KEY}={ranks}: {type(model).__name__} cuts {name}, a {type(part).__name__}, by "
                f"{style!r}; takes linear layers that are cut {OUTPUT_CUT} or {INPUT_CUT}, that is "
                f"{KEY}=1, {OTHERS}"
            )
        found[prefix + name] = style
    if not found:
        raise UnsupportedError(
            f"{KEY}={ranks}: the config of {type(model).__name__} has no plan for it "
            f"(base_model_tp_plan); takes 1, {OTHERS}"
        )
    return found


def check_sizes(module: nn.Module, ranks: int) -> None:
    """So many ranks can have the same number of the model's heads."""
    config: Any = base_module(module).config.get_text_config()
    sizes = {key: getattr(config, key) for key in DIVIDED_SIZES if getattr(config, key, None)}
    most = math.gcd(*sizes.values())
    fitting = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
    for key, size in sizes.items():
        if size % ranks:
            raise UnsupportedError(
                f"{KEY}={ranks} does not divide the model's {key}={size}; takes {fitting}"
            )


def _part(whole: nn.Linear, style: str, ranks: int, group: str) -> nn.Linear:
    if style == INPUT_CUT:
        return AddedLinear(whole, ranks, group)
    return nn.Linear(
        whole.in_features,
        whole.out_features // ranks,
        whole.bias is not None,
        device="meta",
        dtype=whole.weight.dtype,
    )


def _place(model: nn.Module, device: torch.device) -> None:
    """Give the parameters memory on the device, tied ones the same, and bring the buffers there."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    placed: dict[int, nn.Parameter] = {}
    for name, empty in parameters:
        if id(empty) not in placed:
            memory = torch.empty_like(empty, device=device)
            placed[id(empty)] = nn.Parameter(memory, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = placed[id(empty)]
    model.to(device)
