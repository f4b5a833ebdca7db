"""Worker: what holds a model on one rank."""

from __future__ import annotations


class Worker:
    """Base of the roles; a group tells each worker its place before anything else is called."""

    def __init__(self) -> None:
        self._rank = 0
        self._world_size = 1

    def place(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size
