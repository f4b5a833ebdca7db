"""What runs in the Ray actor of a rank, and how batches go there and back.

A DataProto crosses as one numpy buffer for each tensor, which Ray writes once into its object store
and maps on arrival. The receiver then copies what it maps: a worker may write into its batch
without another rank seeing it, and the store has its memory back when the call begins.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from caldera.protocol import DataProto
from caldera.protocol.serialization import (
    SerializedTensorDict,
    deserialize_tensordict,
    serialize_tensordict,
)
from caldera.seeds import seed_everything
from caldera.single_controller._ray import ray_module
from caldera.single_controller.failure import RankFailure, exception_failure
from caldera.single_controller.process_main import START, join_ranks, open_stack_file
from caldera.single_controller.worker import Worker, call_method

logger = logging.getLogger(__name__)

SIOCGIFADDR = 0x8915
"""Linux: the request for the address of a network interface."""
Packed: TypeAlias = tuple[SerializedTensorDict | None, dict[str, NDArray[Any]], dict[str, Any]]
Reply: TypeAlias = tuple[RankFailure | None, Any]
"""How it failed, if it did, and the value: two objects of Ray's, so that the first can be had
without the second."""


@dataclass(frozen=True)
class Location:
    """Where the process of a rank is, and how it can be looked at."""

    node_id: str
    address: str
    pid: int
    log: str
    stack_file: str


@dataclass(frozen=True)
class RankSettings:
    """The settings of an actor before it can be called."""

    world_size: int
    environment: Mapping[str, str]
    device: str
    timeout_s: float
    start_timeout_s: float
    seed: int
    folder: str
    """Where the controller was started."""


class RankActor:
    """The process of one rank. Its methods are not those of the worker: `call` reaches these.

    After a failure every call is answered by it, since the ranks are not in step any more.
    """

    def __init__(self, group: str, rank: int, log_level: int) -> None:
        self.group, self.rank = group, rank
        self.worker: Worker | None = None
        self.store: Any = None
        self.failure: RankFailure | None = None
        logging.basicConfig(
            level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        send_batches_as_arrays()
        self.log = _log()
        folder = os.path.dirname(self.log) or tempfile.gettempdir()
        self.stack_file = os.path.join(folder, f"caldera-stack-{os.getpid()}.txt")
        Path(self.stack_file).unlink(missing_ok=True)  # of an earlier process of this number
        self._stacks = open_stack_file(self.stack_file)

    def __repr__(self) -> str:  # what Ray puts before each line that the rank writes
        return f"{self.group} rank {self.rank}"

    def locate(self) -> Reply:
        """The Location of this rank."""
        ray = ray_module()
        node_id, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return None, Location(node_id, address, os.getpid(), self.log, self.stack_file)

    def open_store(self, address: str, world_size: int, timeout_s: float) -> Reply:
        """The port of a store where the ranks can meet. For rank 0."""

        def port() -> int:
            # The system chooses the port, and no other process can take it before the ranks do.
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                0,
                world_size,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
            return int(self.store.port)

        return self._answer(START, port)

    def start(self, settings: RankSettings, make_worker: Callable[[], Worker]) -> Reply:
        """Join the other ranks, then build the worker."""

        def build() -> None:
            os.environ.update(settings.environment)
            enter(settings.folder)
            seed_everything(settings.seed + self.rank)
            self._join(settings)
            self.worker = make_worker()

        return self._answer(START, build)

    def call(self, method: str, keywords: Sequence[str], *values: Any) -> Reply:
        """Call the worker's method; the last values are those of the keywords."""

        def work() -> Any:
            assert self.worker is not None, "a group builds its workers first"
            split = len(values) - len(keywords)
            named = dict(zip(keywords, values[split:], strict=True))
            return call_method(self.worker, method, values[:split], named)

        return self._answer(method, work)

    def _answer(self, method: str, work: Callable[[], Any]) -> Reply:
        if self.failure is not None:
            return self.failure, None
        try:
            return None, work()
        except BaseException as error:
            logger.exception("rank %d failed in %s", self.rank, method)
            self.failure = exception_failure(self.rank, method, error)
            return self.failure, None

    def _join(self, settings: RankSettings) -> None:
        environment = settings.environment
        store = self.store or dist.TCPStore(  # type: ignore[attr-defined]
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=settings.start_timeout_s),
        )
        if not settings.device.startswith("cuda"):
            cores = os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // int(environment["LOCAL_WORLD_SIZE"])))
            _choose_interface()
        join_ranks(store, self.rank, settings.world_size, settings.device, settings.timeout_s)


def enter(folder: str) -> None:
    """Make relative paths mean what they mean where the run was started, if that folder is here."""
    if Path(folder).is_dir():
        os.chdir(folder)


def send_batches_as_arrays() -> None:
    """From now on this process hands a DataProto to Ray as numpy arrays."""
    ray_module().util.register_serializer(DataProto, serializer=_packed, deserializer=_unpacked)


def _packed(data: DataProto) -> Packed:
    batch = None if data.batch is None else serialize_tensordict(data.batch)
    return batch, data.non_tensor_batch, data.meta_info


def _unpacked(packed: Packed) -> DataProto:
    batch, columns, meta_info = packed
    own = {key: c if c.flags.writeable else c.copy() for key, c in columns.items()}
    return DataProto(None if batch is None else deserialize_tensordict(batch), own, meta_info)


def _log() -> str:
    """The file that Ray sends this process's errors to."""
    output = Path("/proc/self/fd/2")
    if output.is_symlink() and (target := os.readlink(output)).startswith("/"):
        return target
    return f"worker-{ray_module().get_runtime_context().get_worker_id()}*.err"


def _choose_interface() -> None:
    """Have gloo use the interface of the node's address, not that of the machine's name."""
    if sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = ray_module().util.get_node_ip_address()
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            result = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:  # it has no address
            return None
    return socket.inet_ntoa(result[20:24])
