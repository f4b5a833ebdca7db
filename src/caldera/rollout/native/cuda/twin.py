"""The module as the sampler runs it on CUDA: the same weights, in fewer and larger matrices."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from caldera.rollout.native.stacks import STACKS, Product, put_joint, stackable
from caldera.rollout.native.trunk import copied_structure


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
        self.module = copied_structure(module, memo)
        self._held: list[Tensor] = [
            parameter
            for container in self.module.modules()
            for names in STACKS
            for parameter in _stack(container, names)
        ]
        self._held += [*self.module.parameters(), *self.module.buffers()]
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
        return [each.data_ptr() for each in self._held]


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


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of all, of which the parameters become parts."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
