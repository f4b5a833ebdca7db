"""Workers whose phases can be recorded, and which steps of a run are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.profiler import ProfilerActivity, record_function

from caldera.config import PPOTrainerConfig
from caldera.config.profiling import GlobalTorchMemoryConfig, ProfilerConfig
from caldera.config.validate import profilers_of
from caldera.errors import ConfigError
from caldera.single_controller import Dispatch, Worker, WorkerGroup, register

# ---- Recording what this process does, by one tool at a time: its roles may share the recording


@contextmanager
def torch_trace(config: ProfilerConfig, _: GlobalTorchMemoryConfig, path: Path) -> Iterator[None]:
    """torch.profiler: a trace that chrome://tracing and Perfetto open."""
    contents = config.tool_config.torch.contents
    activities = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
    wanted = [name for name in activities if name in contents] or ["cpu", "cuda"]
    if not torch.cuda.is_available():
        wanted = [name for name in wanted if name == "cpu"]
    with torch.profiler.profile(
        activities=[activities[name] for name in wanted],
        record_shapes="shapes" in contents,
        profile_memory="memory" in contents,
        with_stack="stack" in contents,
    ) as profiler:
        yield
    profiler.export_chrome_trace(f"{path}.json.gz")


@contextmanager
def nsys_range(_: ProfilerConfig, __: GlobalTorchMemoryConfig, path: Path) -> Iterator[None]:
    """A capture range of nsys, which writes the file itself."""
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


@contextmanager
def memory_snapshot(
    config: ProfilerConfig, whole: GlobalTorchMemoryConfig, path: Path
) -> Iterator[None]:
    """A snapshot of the GPU's memory with its history, for pytorch.org/memory_viz."""
    arguments: dict[str, Any] = {
        "context": whole.context,
        "stacks": whole.stacks,
        "max_entries": config.tool_config.torch_memory.trace_alloc_max_entries,
        **whole.kw_args,
    }
    torch.cuda.memory._record_memory_history(**arguments)
    yield
    torch.cuda.memory._dump_snapshot(f"{path}.pickle")
    torch.cuda.memory._record_memory_history(enabled=None)


TOOLS = {"torch": torch_trace, "nsys": nsys_range, "torch_memory": memory_snapshot}
"""By `tool`; each records from its beginning to its end, and then writes the file."""


@dataclass
class Recorder:
    """One recording, which begins with the first role that asks for it and ends with the last."""

    _recording: ExitStack = field(default_factory=ExitStack)
    _holders: int = 0

    def start(self, config: ProfilerConfig, memory: GlobalTorchMemoryConfig, name: str) -> None:
        self._holders += 1
        if self._holders == 1:
            path = Path(config.save_path or "outputs/profile").expanduser() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._recording.enter_context(TOOLS[str(config.tool)](config, memory, path))

    def stop(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._recording.close()


RECORDER = Recorder()
"""Of this process."""


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Name a phase in whatever is recorded meanwhile."""
    with ExitStack() as marks:
        marks.enter_context(record_function(name))
        if torch.cuda.is_available():
            marks.enter_context(torch.cuda.nvtx.range(name))
        yield


F = TypeVar("F", bound=Callable[..., Any])


def profiled(role: str) -> Callable[[F], F]:
    """A method of a `ProfiledWorker` that is a phase of this role."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def phase(self: ProfiledWorker, *args: Any, **kwargs: Any) -> Any:
            with self.phase(role, method.__name__):
                return method(self, *args, **kwargs)

        return cast(F, phase)

    return wrap


class ProfiledWorker(Worker):
    """Records steps as the profilers of its roles say.

    A role that records discretely has a file for each of its phases; the others share one that
    holds the whole step, in which all phases of the process are marked.
    """

    def __init__(self, profilers: Mapping[str, ProfilerConfig]) -> None:
        """`profilers`: by role."""
        super().__init__()
        self._profilers = profilers
        self._step: str | None = None
        self._snapshots = GlobalTorchMemoryConfig()
        self._is_whole = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, step: str, memory: GlobalTorchMemoryConfig) -> None:
        """Record from now on; `step` is the folder of the files."""
        self._step, self._snapshots = step, memory
        whole = [role for role in self._recorded() if not self._is_discrete(role)]
        self._is_whole = bool(whole)
        if whole:
            RECORDER.start(self._profilers[whole[0]], memory, self._name(whole[0]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """Write what was recorded."""
        if self._is_whole:
            RECORDER.stop()
        self._step, self._is_whole = None, False

    @contextmanager
    def phase(self, role: str, name: str) -> Iterator[None]:
        """The block is marked, and recorded alone if the role says so."""
        if self._step is None:
            yield
            return
        alone = role in self._recorded() and self._is_discrete(role) and not self._is_whole
        if alone:
            RECORDER.start(self._profilers[role], self._snapshots, self._name(f"{role}_{name}"))
        try:
            with marked(name):
                yield
        finally:
            if alone:
                RECORDER.stop()

    def _recorded(self) -> list[str]:
        """Roles that are recorded on this rank."""
        return [
            role
            for role, config in self._profilers.items()
            # A config that no loader has resolved holds the name of the key that it follows.
            if config.enable is True and (config.all_ranks or self.rank in config.ranks)
        ]

    def _is_discrete(self, role: str) -> bool:
        config = self._profilers[role]
        tools = config.tool_config
        by_tool = {"nsys": tools.nsys.discrete, "torch": tools.torch.discrete}
        return by_tool.get(str(config.tool), False)

    def _name(self, what: str) -> str:
        return f"{self._step}/{what}_rank_{self.rank}"


# ---- Which steps of a run are recorded

NEEDS_CUDA = ("nsys", "torch_memory")


class StepProfiler:
    """Tells the workers to record the steps of `global_profiler.steps`."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._config = config.global_profiler
        self._steps = set(self._config.steps or ())
        self._records = False
        for key, role in profilers_of(config).items():
            if role.enable and role.tool in NEEDS_CUDA and config.trainer.device != "cuda":
                raise ConfigError(
                    f"{key}.tool={role.tool!r}: records a GPU, but trainer.device="
                    f"{config.trainer.device}; takes torch there"
                )

    @contextmanager
    def recorded(self, step: int, groups: Mapping[str, WorkerGroup]) -> Iterator[None]:
        """The block is this step; consecutive steps may be one recording."""
        if step in self._steps and not self._records:
            self._records = True
            for group in groups.values():
                group.start_profile(f"step_{step}", self._config.global_tool_config.torch_memory)
        try:
            yield
        except BaseException:
            self._records = False  # the workers may be gone
            raise
        is_last = not (self._config.profile_continuous_steps and step + 1 in self._steps)
        if self._records and is_last:
            self._records = False
            for group in groups.values():
                group.stop_profile()
