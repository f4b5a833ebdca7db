"""The keys of profilers, none of which this release has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import nested, refused
from caldera.config.reasons import NO_PROFILER

NSIGHT_OPTIONS = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "cuda-graph-trace": "graph",
}


@dataclass
class NsysToolConfig:
    discrete: bool = refused(False, NO_PROFILER)


@dataclass
class NpuToolConfig:
    contents: list[str] = refused([], NO_PROFILER)
    level: str = refused("level0", NO_PROFILER)
    analysis: bool = refused(True, NO_PROFILER)
    discrete: bool = refused(False, NO_PROFILER)


@dataclass
class TorchToolConfig:
    contents: list[str] = refused([], NO_PROFILER)
    discrete: bool = refused(False, NO_PROFILER)


@dataclass
class TorchMemoryToolConfig:
    trace_alloc_max_entries: int = refused(100000, NO_PROFILER)
    stack_depth: int = refused(32, NO_PROFILER)


@dataclass
class ToolConfigs:
    nsys: NsysToolConfig = nested(NsysToolConfig)
    npu: NpuToolConfig = nested(NpuToolConfig)
    torch: TorchToolConfig = nested(TorchToolConfig)
    torch_memory: TorchMemoryToolConfig = nested(TorchMemoryToolConfig)


@dataclass
class ProfilerConfig:
    """What one role records."""

    tool: str | None = refused(None, NO_PROFILER)
    enable: bool = refused(False, NO_PROFILER)
    all_ranks: bool = refused(False, NO_PROFILER)
    ranks: list[int] = refused([], NO_PROFILER)
    save_path: str | None = refused("outputs/profile", NO_PROFILER)
    tool_config: ToolConfigs = nested(ToolConfigs)


@dataclass
class GlobalNsysConfig:
    discrete: bool = refused(False, NO_PROFILER)
    controller_nsight_options: dict[str, Any] = refused(NSIGHT_OPTIONS, NO_PROFILER)
    worker_nsight_options: dict[str, Any] = refused(
        {
            **NSIGHT_OPTIONS,
            "capture-range": "cudaProfilerApi",
            "capture-range-end": None,
            "kill": "none",
        },
        NO_PROFILER,
    )


@dataclass
class GlobalTorchMemoryConfig(TorchMemoryToolConfig):
    context: str = refused("all", NO_PROFILER)
    stacks: str = refused("all", NO_PROFILER)
    kw_args: dict[str, Any] = refused({}, NO_PROFILER)


@dataclass
class GlobalToolConfigs:
    nsys: GlobalNsysConfig = nested(GlobalNsysConfig)
    torch_memory: GlobalTorchMemoryConfig = nested(GlobalTorchMemoryConfig)


@dataclass
class GlobalProfilerConfig:
    """Which steps are recorded, and by which tool."""

    tool: str | None = refused(None, NO_PROFILER)
    steps: list[int] | None = refused(None, NO_PROFILER)
    profile_continuous_steps: bool = refused(False, NO_PROFILER)
    save_path: str = refused("outputs/profile", NO_PROFILER)
    global_tool_config: GlobalToolConfigs = nested(GlobalToolConfigs)
