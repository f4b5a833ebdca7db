"""Registry: the one way to plug something in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from caldera.errors import RegistryError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one kind, such as the advantage estimators.

    >>> losses: Registry[Callable[..., float]] = Registry("policy loss")
    >>> @losses.register("vanilla")
    ... def vanilla() -> float:
    ...     return 0.0
    >>> losses["vanilla"]()
    0.0
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate a thing to register it; the same thing may be registered twice, another not."""

        def add(item: T) -> T:
            if self._items.get(name, item) is not item:
                raise RegistryError(f"{self.kind} {name!r} is registered already")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        guess = nearest(name, self._items)
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise RegistryError(
            f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())})"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        return sorted(self._items)
