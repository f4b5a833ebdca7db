"""Recording what this process does, by one tool at a time: its roles may share the recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, record_function

from caldera.config.profiling import GlobalTorchMemoryConfig, ProfilerConfig

__all__ = ["RECORDER", "Recorder", "marked"]


class Tool(Protocol):
    """Records from `start` to `stop`, which writes the file."""

    def start(self) -> None: ...

    def stop(self, path: Path) -> None: ...


class TorchTool:
    """torch.profiler: a trace that chrome://tracing and Perfetto open."""

    def __init__(self, config: ProfilerConfig) -> None:
        contents = config.tool_config.torch.contents
        activities = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
        wanted = [name for name in activities if name in contents] or ["cpu", "cuda"]
        self._profiler = torch.profiler.profile(
            activities=[activities[name] for name in wanted if _has(name)],
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
        )

    def start(self) -> None:
        self._profiler.start()

    def stop(self, path: Path) -> None:
        self._profiler.stop()
        self._profiler.export_chrome_trace(f"{path}.json.gz")


def _has(activity: str) -> bool:
    return activity == "cpu" or torch.cuda.is_available()


class NsysTool:
    """A capture range of nsys, which writes the file itself."""

    def start(self) -> None:
        torch.cuda.profiler.start()

    def stop(self, path: Path) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class MemoryTool:
    """A snapshot of the GPU's memory with its history, for pytorch.org/memory_viz."""

    def __init__(self, config: ProfilerConfig, whole: GlobalTorchMemoryConfig) -> None:
        entries = config.tool_config.torch_memory.trace_alloc_max_entries
        self._arguments: dict[str, Any] = {
            "context": whole.context, "stacks": whole.stacks, "max_entries": entries,
            **whole.kw_args,
        }  # fmt: skip

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(**self._arguments)

    def stop(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(f"{path}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


def tool_of(config: ProfilerConfig, memory: GlobalTorchMemoryConfig) -> Tool:
    """The tool that the config names."""
    if config.tool == "torch":
        return TorchTool(config)
    if config.tool == "nsys":
        return NsysTool()
    assert config.tool == "torch_memory", "the config's choices are these"
    return MemoryTool(config, memory)


@dataclass
class Recorder:
    """One recording, which begins with the first role that asks for it and ends with the last."""

    _tool: Tool | None = None
    _path: Path = field(default_factory=Path)
    _holders: int = 0

    def start(self, config: ProfilerConfig, memory: GlobalTorchMemoryConfig, name: str) -> None:
        self._holders += 1
        if self._holders == 1:
            self._path = Path(config.save_path or "outputs/profile").expanduser() / name
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._tool = tool_of(config, memory)
            self._tool.start()

    def stop(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self._tool is not None:
            tool, self._tool = self._tool, None
            tool.stop(self._path)


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
