"""`@register`: how a worker's method is called through its group.

The controller calls `group.method(batch)` once. *Dispatch* says what each rank gets of the
arguments and how the results are put together; *execute* says which ranks run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from caldera.errors import ConfigError, RegistryError
from caldera.protocol import DataProtoFuture

ATTRIBUTE = "attrs_3141562937"
"""Where `register` leaves its note on a method."""

F = TypeVar("F", bound=Callable[..., Any])
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
DispatchFn: TypeAlias = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
"""(group, *args, **kwargs) -> args and kwargs, each of them a list with one value for each rank."""
CollectFn: TypeAlias = Callable[[Any, list[Any]], Any]
"""(group, the ranks' results, or what stands for them when the call does not block) -> result"""


class _Modes(type):
    """Makes the modes, also those that are registered later, attributes of `Dispatch`."""

    _known: dict[str, Dispatch]

    def __getattr__(cls, name: str) -> Dispatch:
        if name.startswith("_") or name not in cls._known:
            raise AttributeError(f"Dispatch has no mode {name!r} (known: {', '.join(cls._known)})")
        return cls._known[name]

    def __iter__(cls) -> Iterator[Dispatch]:
        return iter(cls._known.values())


@dataclass(frozen=True)
class Dispatch(metaclass=_Modes):
    """A way to dispatch arguments to the ranks and to collect their results; see `dispatching`."""

    name: str

    _known: ClassVar[dict[str, Dispatch]] = {}

    RANK_ZERO: ClassVar[Dispatch]
    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP_COMPUTE: ClassVar[Dispatch]
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    DIRECT_ROLLOUT_METHOD: ClassVar[Dispatch]

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


class Execute(Enum):
    ALL = auto()
    RANK_ZERO = auto()


DispatchMode: TypeAlias = Dispatch | Mapping[str, Any]
"""A mode, or {"dispatch_fn": ..., "collect_fn": ...}, and "mesh_name" if it deals by a mesh."""


@dataclass(frozen=True)
class Registration:
    """What `register` notes on a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True
    needs: tuple[str, ...] | None = None
    balance: bool = True
    in_mini_batches: bool = False


_functions: dict[Dispatch, tuple[DispatchFn, CollectFn]] = {}


def _names() -> list[str]:
    return [mode.name for mode in Dispatch]


def register_dispatch_mode(name: str) -> Dispatch:
    """Add the mode `Dispatch.<name>`; `update_dispatch_mode` says what it does."""
    if name in _names():
        raise RegistryError(f"dispatch mode {name!r} is registered already")
    mode = Dispatch(name)
    Dispatch._known[name] = mode
    return mode


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> None:
    """Say what a mode does with the arguments and the results of a call."""
    if dispatch_mode not in list(Dispatch):
        raise RegistryError(f"{dispatch_mode!r} is no dispatch mode (known: {', '.join(_names())})")
    _functions[dispatch_mode] = (dispatch_fn, collect_fn)


def functions_of(dispatch_mode: DispatchMode) -> tuple[DispatchFn, CollectFn]:
    """How a mode splits arguments and collects results."""
    if not isinstance(dispatch_mode, Dispatch):
        return dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"]
    if dispatch_mode not in _functions:
        raise RegistryError(f"{dispatch_mode!r} does nothing yet: call update_dispatch_mode")
    return _functions[dispatch_mode]


for _name in filter(str.isupper, Dispatch.__annotations__):
    register_dispatch_mode(_name)


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    needs: Sequence[str] | None = None,
    balance: bool = True,
    in_mini_batches: bool = False,
) -> Callable[[F], F]:
    """Make a worker's method callable through its group.

    With `blocking=False` the call returns at once: a DataProtoFuture where the result will be a
    DataProto, else what stands for each rank's result. `materialize_futures` says that the method
    wants a DataProto where it is given a DataProtoFuture. `needs` names the tensors and columns
    that the method reads of a DataProto: when it goes to another process, only those of them that
    it has are sent. None sends all.

    In a group with `Balancing`, rows go to the ranks by sequence length, padded where they do not
    fill them, and outputs come back in the order of the batch. `balance=False` is for a method
    whose ranks must get consecutive rows; `in_mini_batches` for one that makes an optimiser step
    a mini-batch.
    """
    _check_mode(dispatch_mode)
    wanted = None if needs is None else tuple(needs)
    modes = (dispatch_mode, execute_mode, blocking, materialize_futures)
    note = vars(Registration(*modes, wanted, balance, in_mini_batches))

    def mark(method: F) -> F:
        marked = _with_materialized_arguments(method) if materialize_futures else method
        setattr(marked, ATTRIBUTE, note)
        return marked

    return mark


def registration_of(method: Any) -> Registration | None:
    """The note that `register` left, if it did."""
    note = getattr(method, ATTRIBUTE, None)
    return None if note is None else Registration(**note)


def materialize(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments, with a DataProto for every DataProtoFuture among them."""
    return (
        tuple(_materialized(value) for value in args),
        {name: _materialized(value) for name, value in kwargs.items()},
    )


def _materialized(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value


def _with_materialized_arguments(method: F) -> F:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_later(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = materialize(args, kwargs)
            return await method(*args, **kwargs)

        return cast(F, call_later)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = materialize(args, kwargs)
        return method(*args, **kwargs)

    return cast(F, call)


def _check_mode(mode: Any) -> None:
    if isinstance(mode, Dispatch):
        return
    if isinstance(mode, Mapping) and all(callable(mode.get(f)) for f in _FUNCTION_NAMES):
        return
    raise ConfigError(
        f"register: dispatch_mode={mode!r} is none of {', '.join(_names())}, "
        f"nor a dict of the functions {' and '.join(_FUNCTION_NAMES)}"
    )


_FUNCTION_NAMES = ("dispatch_fn", "collect_fn")
