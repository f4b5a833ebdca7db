"""Which class works for a role: the role's own, a registered one, or one of the user's file."""

from __future__ import annotations

from typing import Any

from caldera.data import chosen_class
from caldera.registry import Registry
from caldera.single_controller import ClassWithInitArgs, Worker

WORKERS: Registry[type[Worker]] = Registry("worker")
"""What the keys `worker_class` choose from."""


class ChosenWorker(ClassWithInitArgs):
    """How to build the worker that a key names.

    It is pickled by that name: a class of a user's file cannot be imported elsewhere.
    """

    def __init__(self, name: str | None, base: type[Worker], key: str, *args: Any) -> None:
        super().__init__(chosen_class(WORKERS, name, base, key), *args)
        self._choice = name, base, key

    def __reduce__(self) -> tuple[type[ChosenWorker], tuple[Any, ...]]:
        return type(self), (*self._choice, *self.args)
