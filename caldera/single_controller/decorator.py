"""`@register`: how a worker's method is called through its group.

The controller calls `group.method(batch)` once. *Dispatch* says what each rank gets of the
arguments and how the answers are put together; *execute* says which ranks run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from caldera.protocol import DataProto

ATTRIBUTE = "attrs_3141562937"
"""Where `register` leaves its note on a method."""

F = TypeVar("F", bound=Callable[..., Any])
Arguments = tuple[list[Any], dict[str, Any]]


class Dispatch(Enum):
    RANK_ZERO = auto()
    ONE_TO_ALL = auto()
    ALL_TO_ALL = auto()
    DP_COMPUTE_PROTO = auto()


class Execute(Enum):
    ALL = auto()
    RANK_ZERO = auto()


@dataclass(frozen=True)
class Registration:
    dispatch_mode: Dispatch
    execute_mode: Execute


def register(
    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL
) -> Callable[[F], F]:
    """Make a worker's method callable through its group."""

    def mark(method: F) -> F:
        setattr(method, ATTRIBUTE, Registration(dispatch_mode, execute_mode))
        return method

    return mark


def registration_of(method: Any) -> Registration | None:
    """The note that `register` left, if it did."""
    return getattr(method, ATTRIBUTE, None)


def dispatch(
    mode: Dispatch, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Arguments]:
    """The arguments of each rank: a DataProto is cut, and what is not is given to all.

    ALL_TO_ALL gives each rank its element, when every argument is a list of one for each.
    """
    scattered = mode is Dispatch.ALL_TO_ALL and all(
        isinstance(value, list) and len(value) == world_size for value in (*args, *kwargs.values())
    )

    def shares(value: Any) -> list[Any]:
        if scattered:
            return list(value)
        if mode is Dispatch.DP_COMPUTE_PROTO and isinstance(value, DataProto):
            return list(value.chunk(world_size))
        return [value] * world_size

    split_args = [shares(value) for value in args]
    split_kwargs = {name: shares(value) for name, value in kwargs.items()}
    return [
        ([part[rank] for part in split_args], {k: part[rank] for k, part in split_kwargs.items()})
        for rank in range(world_size)
    ]


def collect(mode: Dispatch, outputs: list[Any]) -> Any:
    """One answer out of every rank's."""
    if mode is Dispatch.DP_COMPUTE_PROTO:
        return DataProto.concat(outputs)
    return outputs[0] if mode is Dispatch.RANK_ZERO else outputs
