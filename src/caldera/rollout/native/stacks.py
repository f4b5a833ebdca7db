"""Layers that multiply the same input as one product, of which each hands out its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that multiply the same input."""


def stackable(container: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """The layers of these names; none if they are not all there and plain, as with adapters."""
    layers = [container._modules.get(name) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers):
        return []
    linears = cast(list[nn.Linear], layers)
    return linears if len({linear.bias is None for linear in linears}) == 1 else []


def put_joint(
    container: nn.Module,
    names: tuple[str, ...],
    multiply: Callable[[Tensor], Tensor],
    sizes: list[int],
) -> None:
    """Let the layers of these names be parts of one that multiplies so."""
    joint = _Joint(multiply, sizes)
    for index, name in enumerate(names):
        setattr(container, name, _Part(joint, index))


class Product:
    """By a weight (N, K), with a bias (N,) if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, values: Tensor) -> Tensor:
        return F.linear(values, self.weight, self.bias)


def joint_product(container: nn.Module, name: str) -> Product | None:
    """What a layer's stack multiplies by; None if the layer is part of none."""
    part = container._modules.get(name)
    multiply = part.joint.multiply if isinstance(part, _Part) else None
    return multiply if isinstance(multiply, Product) else None


class _Joint:
    """What some layers that multiply the same input compute together, when the first is asked.

    Each piece is handed out once: after a pass that was broken off, the first layer of the next one
    finds its own gone, and all are computed anew.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor], sizes: list[int]) -> None:
        self.multiply = multiply
        self._sizes = sizes
        self._pieces: list[Tensor | None] = [None] * len(sizes)

    def take(self, values: Tensor, index: int) -> Tensor:
        if self._pieces[index] is None:
            self._pieces = list(self.multiply(values).split(self._sizes, dim=-1))
        piece, self._pieces[index] = self._pieces[index], None
        assert piece is not None, "it has just been computed"
        return piece


class _Part(nn.Module):
    """In the place of one of the layers."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self._index = index

    def forward(self, values: Tensor) -> Tensor:
        return self.joint.take(values, self._index)
