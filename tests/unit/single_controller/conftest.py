from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from caldera.single_controller import Worker, WorkerGroup
from caldera.single_controller.in_process import Finished
from caldera.single_controller.worker import call_method


class RanksInThisProcess(WorkerGroup):
    """Several workers one after the other, treated as if they were in other processes."""

    def __init__(self, make_worker: Callable[[], Worker], ranks: int) -> None:
        self.workers = [make_worker() for _ in range(ranks)]
        for rank, worker in enumerate(self.workers):
            worker.place(rank, ranks)
        self.log: list[tuple[int, str]] = []
        super().__init__(type(self.workers[0]), ranks)

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Finished:
        self.log.append((rank, method_name))
        return Finished(call_method(self.workers[rank], method_name, args, kwargs))

    def _resolve(self, pending: list[Finished]) -> list[Any]:
        return [answer.value for answer in pending]

    def shutdown(self) -> None:
        self.workers.clear()

    def is_alive(self, rank: int) -> bool:
        return bool(self.workers)


@pytest.fixture
def ranks() -> Callable[..., RanksInThisProcess]:
    """A group of workers that all run in this process; `log` lists what was called where."""

    def make(make_worker: Callable[[], Worker], count: int = 2) -> RanksInThisProcess:
        return RanksInThisProcess(make_worker, count)

    return make
