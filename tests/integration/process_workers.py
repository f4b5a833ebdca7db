"""Workers for the tests of local processes, in a module that those processes can import."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Probe(Worker):
    def __init__(self, label: str = "probe") -> None:
        super().__init__()
        self.label = label
        self._register_dispatch_collect_info("shared", 0, self.rank == 1)
        self._register_dispatch_collect_info("reversed", 1 - self.rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def whereabouts(self, *names: str) -> Any:
        return self.rank, self.world_size, [os.environ.get(name) for name in names]

    @register(Dispatch.ONE_TO_ALL)
    def sum_over_ranks(self, number: float) -> float:
        total = torch.tensor(number * (self.rank + 1))
        dist.all_reduce(total)
        return float(total)

    @register(Dispatch.ONE_TO_ALL)
    def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "label": self.label,
            "backend": dist.get_backend(),
            "threads": torch.get_num_threads(),
            "torch": torch.rand(1).item(),
            "numpy": np.random.rand(),
            "master": self.get_master_addr_port(),
        }

    @register(Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None:
        self.print_rank0("rank 0 alone says", text)
        os.write(2, f"rank {self.rank} says {text}\n".encode())

    # ---- modes

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(Dispatch.ALL_TO_ALL)
    def all_to_all(self, value: Any) -> Any:
        return self.rank, value

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, value: Any) -> Any:
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def first_alone(self) -> int:
        return self.rank

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data: DataProto, factor: int = 1) -> DataProto:
        x = tensors_of(data)["x"]
        names = {"name": data.non_tensor_batch["name"]}
        metrics = {"rows": len(data)}
        return DataProto.from_dict({"x": x + factor * self.rank}, names, {"metrics": metrics})

    @register(make_nd_compute_dataproto_dispatch_fn("shared"))
    def on_shared_mesh(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": tensors_of(data)["x"] + 10 * self.rank})

    @register(make_nd_compute_dataproto_dispatch_fn("reversed"))
    def on_reversed_mesh(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": tensors_of(data)["x"] + 10 * self.rank})

    @register(Dispatch.DP_COMPUTE_PROTO, needs=("x", "name"))
    def keys(self, data: DataProto) -> DataProto:
        keys = [*tensors_of(data).keys(), *data.non_tensor_batch]
        return DataProto(meta_info={"metrics": {"keys": sorted(keys)}})

    # ---- memory

    @register(Dispatch.DP_COMPUTE_PROTO)
    def overwrite(self, data: DataProto) -> DataProto:
        x = tensors_of(data)["x"]
        was_shared = torch.full((len(data),), x.is_shared())
        x.fill_(self.rank + 100)
        return DataProto.from_dict({"was_shared": was_shared})

    @register(Dispatch.ONE_TO_ALL)
    def keep(self) -> DataProto:
        """Returns what it keeps, so that both sides hold the same memory."""
        self.kept = torch.zeros(3)
        return DataProto.from_dict({"kept": self.kept})

    @register(Dispatch.ONE_TO_ALL)
    def fill_kept(self, value: float) -> None:
        self.kept.fill_(value)

    # ---- time

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def once_there_is(self, data: DataProto, path: Path) -> DataProto:
        while not path.exists():
            time.sleep(0.01)
        return data

    @register(Dispatch.ONE_TO_ALL)
    def make(self, path: Path) -> None:
        path.touch()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def echo_later(self, value: Any) -> Any:
        return value

    # ---- failures

    @register(Dispatch.ONE_TO_ALL)
    def raise_in(self, rank: int) -> None:
        dist.barrier()  # all are in the call before one of them fails
        if self.rank == rank:
            raise ValueError(f"rank {rank} cannot go on")
        dist.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def killed(self, rank: int, by: int) -> None:
        if self.rank == rank:
            print("about to be killed")
            os.kill(os.getpid(), by)
        dist.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def exit_in(self, rank: int, status: int) -> None:
        if self.rank == rank:
            os._exit(status)
        time.sleep(60)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_in(self, rank: int) -> None:
        if self.rank == rank:
            threading.Event().wait()

    @register(Dispatch.ONE_TO_ALL)
    def start_program(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    @register(Dispatch.ONE_TO_ALL)
    def not_to_be_sent(self) -> Any:
        return threading.Lock() if self.rank == 1 else None


class Other(Worker):
    """A second role."""

    @register(Dispatch.ONE_TO_ALL)
    def label_of_probe(self) -> Any:
        probe = self.get_fused_worker_by_name("probe")
        return self.rank, getattr(probe, "label", None)

    @register(Dispatch.ONE_TO_ALL)
    def raise_in(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("other")


class Unbuildable(Worker):
    def __init__(self) -> None:
        super().__init__()
        if self.rank == 1:
            raise FileNotFoundError("no such model: /models/none")


def first_name(worker: Worker, data: DataProto) -> DataProto:
    """For `execute_with_func_generator`."""
    return DataProto.from_dict({"x": tensors_of(data)["x"] * 10 + worker.rank})


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
