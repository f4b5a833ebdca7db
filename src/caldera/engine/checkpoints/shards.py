"""Where the part of a DTensor that a rank wrote lies in the whole tensor.

A file is read by other processes than wrote it, so what it tells is all there is: the device mesh
of a tensor has no processes any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


class Position:
    """The place of a rank in the meshes of the tensors that it wrote."""

    def __init__(self, rank: int, ranks: int, values: Iterable[Any]) -> None:
        self._rank = rank
        self._ranks = ranks
        self._by_name: dict[str, int] = {}
        for value in values:
            if isinstance(value, DTensor):
                names, shape = _mesh(value)
                if names is not None and math.prod(shape) == ranks:
                    self._by_name.update(zip(names, _unravelled(rank, shape), strict=True))

    def offset(self, tensor: DTensor) -> tuple[int, ...]:
        """Where this rank's part begins; a ValueError says why that cannot be told."""
        place, shape = self._coordinates(tensor), _mesh(tensor)[1]
        offset, size = [0] * tensor.dim(), list(tensor.shape)
        # Tensor parallelism cuts first: FSDP, which comes earlier in the mesh, cuts what is left.
        for dim in sorted(range(len(shape)), key=lambda dim: _is_strided(tensor, dim)):
            cut = tensor.placements[dim]
            if isinstance(cut, Partial):
                raise ValueError("it holds parts of sums")
            axis = getattr(cut, "dim", None)
            if axis is None:
                continue
            step = -(-size[axis] // shape[dim])
            begin = min(place[dim] * step, size[axis])
            offset[axis] += begin
            size[axis] = min(step, size[axis] - begin)
        held = tuple(tensor.to_local().shape)
        if tuple(size) != held:
            raise ValueError(f"its part should be {tuple(size)}, not {held}")
        return tuple(offset)

    def _coordinates(self, tensor: DTensor) -> list[int]:
        names, shape = _mesh(tensor)
        if math.prod(shape) == self._ranks:
            return _unravelled(self._rank, shape)
        if names is None or not set(names) <= self._by_name.keys():
            raise ValueError(f"its mesh {shape} does not say which of {self._ranks} ranks it is of")
        return [self._by_name[name] for name in names]


def _mesh(tensor: DTensor) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    """The names and sizes of a mesh's dimensions, in files of older versions of torch too."""
    held = vars(tensor.device_mesh)
    older = held.get("mesh")
    if isinstance(older, Tensor):
        return held.get("mesh_dim_names"), tuple(older.shape)
    return tensor.device_mesh.mesh_dim_names, tuple(tensor.device_mesh.shape)


def _unravelled(rank: int, shape: tuple[int, ...]) -> list[int]:
    """The coordinates of a rank, the last dimension running fastest."""
    found = []
    for size in reversed(shape):
        found.append(rank % size)
        rank //= size
    return found[::-1]


def _is_strided(tensor: DTensor, dim: int) -> bool:
    return getattr(tensor.placements[dim], "split_factor", 1) > 1
