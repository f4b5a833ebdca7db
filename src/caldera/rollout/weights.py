"""Copying a stream of named weights into a module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from caldera.errors import RolloutError

NAMES_SHOWN = 5


def copy_weights(module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every weight into the module's tensor of that name, in place.

    A tied weight may come under any of its names, or under several. The stream must name nothing
    that the module lacks, and leave no parameter out.
    """
    targets: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    optional = dict(module.named_buffers())
    copied: set[int] = set()
    unexpected: list[str] = []
    with torch.no_grad():
        for name, weight in stream:
            target = targets.get(name, optional.get(name))
            if target is None:
                unexpected.append(name)
                continue
            if target.shape != weight.shape:
                raise RolloutError(
                    f"weight {name!r} has shape {tuple(weight.shape)}, "
                    f"the sampler's has {tuple(target.shape)}"
                )
            target.copy_(weight)
            copied.add(id(target))
    missing = [name for name, target in targets.items() if id(target) not in copied]
    if missing or unexpected:
        raise RolloutError(
            f"weights do not fit the sampler's {type(module).__name__}: "
            f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
        )


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
