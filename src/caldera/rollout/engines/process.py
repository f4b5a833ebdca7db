"""An engine in a process of another Python."""

from __future__ import annotations

import os
import subprocess
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from caldera.config.samplers import check_sampling_ranks
from caldera.errors import RolloutError
from caldera.rollout.engines.host import __path__ as host_path
from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.rollout.engines.host.caldera_engine.buckets import Adapter, Bucket
from caldera.rollout.engines.options import reseeded

# ---- One engine over the devices of several ranks: the first of them runs it

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class EngineRanks:
    """Consecutive ranks of the run, on one node, whose devices one engine uses."""

    def __init__(self, members: list[int], group: dist.ProcessGroup, device: torch.device) -> None:
        """To be made by every member at once; `group` is of the hosts."""
        self._group = group
        self.leads = dist.get_rank() == members[0]
        """Whether the engine is this rank's."""
        found: list[str | None] = [None] * len(members)
        dist.all_gather_object(found, _device_name(device), group)
        self.devices = [name for name in found if name is not None]
        """The GPUs of all members, as CUDA_VISIBLE_DEVICES names them; none on CPUs."""

    @classmethod
    def join(cls, size: int, device: torch.device) -> EngineRanks | None:
        """The ranks that this one shares an engine with; None: its engine is its own.

        Every rank of the run must come here. A run of one rank shares nothing: its engine has the
        devices that the process sees.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if size == 1 or ranks == 1:
            return None
        check_sampling_ranks(size, ranks)
        group, _ = dist.new_subgroups(size, backend="gloo")
        return cls(dist.get_process_group_ranks(group), group, device)

    def wait(self) -> None:
        """Return once every member has come here."""
        dist.barrier(self._group)


def _device_name(device: torch.device) -> str | None:
    """Of a GPU, as a process that sees others would have to name it."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get(VISIBLE_DEVICES)
    return visible.split(",")[index].strip() if visible else str(index)


OF_THIS_PROCESS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of a worker, which an engine would take for its own."""
LINES_SHOWN = 15
BYTES_SHOWN = 1 << 14
SECONDS_TO_END = 10.0


class EngineDied(Exception):
    """The process has ended, or does not listen any more."""


class EngineProcess:
    """The methods of `SteppedEngine`, carried out over there. Any may raise EngineDied."""

    def __init__(
        self,
        python: str,
        name: str,
        arguments: dict[str, Any],
        environment: dict[str, str],
        gpus: Sequence[str] = (),
    ) -> None:
        """`environment` is added to that of this process, unless it is set there; `gpus` are those
        that the engine sees, if not the ones that this process does."""
        self._command = [python, "-m", "caldera_engine"]
        self._name = name
        self._arguments = arguments
        self._environment = environment
        self._gpus = {VISIBLE_DEVICES: ",".join(gpus)} if gpus else {}
        self._told = f"actor_rollout_ref.rollout.engine_python={python!r} ({name})"
        self._starts = 0
        self.torch_version = ""
        """Of the other Python."""
        self._end: Callable[[], object] | None = None
        self.start()

    def start(self) -> None:
        """Begin, or begin anew after the process has died; returns when the engine is up."""
        self.close()
        ours, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        command = [*self._command, str(theirs.fileno()), self._name]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env=self._environ(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                )
        except OSError as error:
            ours.close()
            self._log.close()
            raise RolloutError(f"{self._told} cannot be run: {error}") from error
        self.connection: Connection = ours
        """Is readable when `step` would not wait, unless `has_events`."""
        self._events: list[Event] = []
        self._end = weakref.finalize(self, _end, self._process, ours, self._log)
        try:
            self._send(reseeded(self._name, self._arguments, self._starts))
            self.torch_version = str(self._answer())
        except EngineDied as error:  # which holds the last lines
            self.close()
            raise RolloutError(f"{self._told} does not start: {error}") from error
        except RolloutError as error:
            shown = self._last_lines()
            self.close()
            raise RolloutError(f"{self._told} does not start: {error}{shown}") from error
        self._starts += 1

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def add(self, number: int, prompt_ids: list[int], params: dict[str, Any], seed: int) -> None:
        self._order("add", number=number, prompt_ids=prompt_ids, params=params, seed=seed)

    def abort(self, number: int) -> None:
        self._order("abort", number=number)

    def step(self) -> list[Event]:
        """Waits until there is a new event."""
        while not self._events:
            self._take(self._receive())
        events, self._events = self._events, []
        return events

    def load_bucket(self, bucket: Bucket, first: bool) -> None:
        self._call("load_bucket", bucket=bucket, first=first)

    def use_weights(self, version: int, adapter: Adapter | None) -> None:
        self._call("use_weights", version=version, adapter=adapter)

    def score(self, prompt_ids: list[int]) -> list[float]:
        log_probs: list[float] = self._call("score", prompt_ids=prompt_ids)
        return log_probs

    def sleep(self) -> bool:
        return bool(self._call("sleep"))

    def wake_up(self, part: str | None) -> None:
        self._call("wake_up", part=part)

    def close(self) -> None:
        if self._end is not None:
            self._end()

    def _call(self, what: str, **arguments: Any) -> Any:
        self._order(what, **arguments)
        return self._answer()

    def _order(self, what: str, **arguments: Any) -> None:
        self._send({"do": what, **arguments})

    def _answer(self) -> Any:
        while True:
            message = self._receive()
            if "failed" in message:
                raise RolloutError(f"{self._told}: {message['failed']}")
            if "answer" in message:
                return message["answer"]
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        self._events += [Event(**event) for event in message["events"]]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise EngineDied(self._epitaph()) from error

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise EngineDied(self._epitaph()) from error

    def _epitaph(self) -> str:
        try:
            code = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} has closed its connection{self._last_lines()}"
        return f"process {self.pid} has ended with status {code}{self._last_lines()}"

    def _last_lines(self) -> str:
        """Of its log, each behind a line break; nothing once it was closed here."""
        if self._log.closed:
            return ""
        number = self._log.fileno()  # whose position is the process's, too, so that it must stay
        size = os.fstat(number).st_size
        text = os.pread(number, BYTES_SHOWN, max(0, size - BYTES_SHOWN)).decode(errors="replace")
        return "".join(f"\n{line}" for line in text.splitlines()[-LINES_SHOWN:])

    def _environ(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in OF_THIS_PROCESS}
        path = str(Path(next(iter(host_path))).resolve())
        return {**self._environment, **kept, **self._gpus, "PYTHONPATH": path}


def _end(process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
    """The process ends itself when its connection is closed; if it does not, it is ended."""
    connection.close()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()


# ---- Which of several engines serves a request

SESSIONS_REMEMBERED = 10_000


class Sessions:
    """Requests of one session go where its first one went, where what they begin with is cached."""

    def __init__(self, remembered: int = SESSIONS_REMEMBERED) -> None:
        """Of sessions, the `remembered` that were used last are."""
        self._remembered = remembered
        self._homes: OrderedDict[str, int] = OrderedDict()

    def home(self, session: str | None, load: Sequence[int]) -> int:
        """The engine for a request: else that with the fewest; `load` is how many each has."""
        fewest = min(range(len(load)), key=load.__getitem__)
        if session is None:
            return fewest
        home = self._homes.setdefault(session, fewest)
        self._homes.move_to_end(session)
        if len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return home
