"""The module as the sampler runs it on CUDA: the same weights, in fewer and larger matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caldera.models.forward import decoder_layers

STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that multiply the same input."""


class Twin:
    """A copy of the module's structure that has its weights, not copies of them.

    Where layers multiply the same input, their weights come to lie behind each other in memory, so
    that the twin multiplies by all of them at once, while the module keeps a parameter for each. An
    optimiser that changes these in place changes the twin.

    In another precision than the module's, the twin's weights are its own, and `refresh` brings
    them up to date.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """`dtype`: what the twin computes in."""
        self._casts: list[tuple[Tensor, Tensor]] = []  # from the module, to the twin
        memo: dict[int, object] = {id(each): each for each in module.buffers()}
        for parameter in module.parameters():
            memo[id(parameter)] = self._counterpart(parameter, dtype)
        self.module = copy.deepcopy(module, memo)
        for layer in decoder_layers(self.module):
            layer.__dict__.pop("forward", None)  # compiled for training, and the module's own
        self._stacks = [
            _stack(container, names) for container in self.module.modules() for names in STACKS
        ]
        self.module.eval()
        self._addresses = self._find_addresses()
        self.refresh()

    def _counterpart(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        if parameter.dtype == dtype:
            return parameter
        own = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
        self._casts.append((parameter, own))
        return own

    def refresh(self) -> None:
        """Take over the module's weights, where they are not the twin's as well."""
        with torch.no_grad():
            for source, target in self._casts:
                target.copy_(source)

    @property
    def has_moved(self) -> bool:
        """Whether weights are elsewhere than when the twin was made."""
        return self._addresses != self._find_addresses()

    def _find_addresses(self) -> list[int]:
        weights = [*self.module.parameters(), *self.module.buffers()]
        held = [parameter for stack in self._stacks for parameter in stack]
        return [each.data_ptr() for each in (*weights, *held)]


def _stack(container: nn.Module, names: tuple[str, ...]) -> list[nn.Parameter]:
    """Replace the layers of these names by parts of one; returns their parameters."""
    linears = stackable(container, names)
    if not linears:
        return []
    weights = [cast(nn.Parameter, linear.weight) for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = _joined(weights)
    bias = _joined(biases) if biases else None
    sizes = [linear.out_features for linear in linears]
    put_joint(container, names, Product(weight, bias), sizes)
    return [*weights, *biases]


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


def forget_pieces(module: nn.Module) -> None:
    """Let no layer of a pass that was broken off hand out what that had computed."""
    for part in module.modules():
        if isinstance(part, _Part):
            part.joint.forget()


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of all, of which the parameters become parts."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


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
    """What some layers that multiply the same input compute together, when the first is asked."""

    def __init__(self, multiply: Callable[[Tensor], Tensor], sizes: list[int]) -> None:
        self.multiply = multiply
        self._sizes = sizes
        self._pieces: tuple[Tensor, ...] | None = None
        self._left = 0

    def forget(self) -> None:
        self._pieces = None

    def take(self, values: Tensor, index: int) -> Tensor:
        if self._pieces is None:
            self._pieces = self.multiply(values).split(self._sizes, dim=-1)
            self._left = len(self._sizes)
        piece = self._pieces[index]
        self._left -= 1
        if self._left == 0:
            self._pieces = None
        return piece


class _Part(nn.Module):
    """In the place of one of the layers."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self._index = index

    def forward(self, values: Tensor) -> Tensor:
        return self.joint.take(values, self._index)
