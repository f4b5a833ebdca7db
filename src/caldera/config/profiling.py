"""The keys of profilers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import listed, mapping, nested, option, refused, shown
from caldera.errors import ConfigError

TOOLS = ("nsys", "torch", "torch_memory")
TORCH_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack")
AROUND_THE_COMMAND = "nsys is started around the command, with options of its own"
NO_NPU = "there is no NPU behind any device of this release"
WHOLE_STACKS = "torch records whole stacks"

NSIGHT_OPTIONS = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "cuda-graph-trace": "graph",
}


@dataclass
class NsysToolConfig:
    discrete: bool = II("global_profiler.global_tool_config.nsys.discrete")
    """A capture range for each phase of the role, instead of one for the step."""


@dataclass
class NpuToolConfig:
    contents: list[str] = refused([], NO_NPU)
    level: str = refused("level0", NO_NPU)
    analysis: bool = refused(True, NO_NPU)
    discrete: bool = refused(False, NO_NPU)


@dataclass
class TorchToolConfig:
    contents: list[str] = listed()
    """What is recorded: of cpu, cuda, memory, shapes, stack; empty: cpu, and cuda if there is."""
    discrete: bool = False
    """A trace for each phase of the role, instead of one for the step."""


@dataclass
class TorchMemoryToolConfig:
    trace_alloc_max_entries: int = option(
        II("global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries"),
        minimum=1, unit="events",
    )  # fmt: skip
    """Newest allocations and releases that a snapshot holds."""
    stack_depth: int = refused(
        II("global_profiler.global_tool_config.torch_memory.stack_depth"), WHOLE_STACKS
    )


@dataclass
class ToolConfigs:
    nsys: NsysToolConfig = nested(NsysToolConfig)
    npu: NpuToolConfig = nested(NpuToolConfig)
    torch: TorchToolConfig = nested(TorchToolConfig)
    torch_memory: TorchMemoryToolConfig = nested(TorchMemoryToolConfig)


@dataclass
class ProfilerConfig:
    """What one role records."""

    tool: str | None = option(II("global_profiler.tool"), choices=TOOLS)
    """nsys, torch or torch_memory; the same for all roles."""
    enable: bool = False
    """Record this role in the steps of global_profiler.steps."""
    all_ranks: bool = False
    """Record all ranks."""
    ranks: list[int] = listed()
    """Or these."""
    save_path: str | None = II("global_profiler.save_path")
    """Folder of the role's files."""
    tool_config: ToolConfigs = nested(ToolConfigs)


@dataclass
class RolloutProfilerConfig(ProfilerConfig):
    enable: bool = II("actor_rollout_ref.actor.profiler.enable")
    """Record sampling in the steps of global_profiler.steps."""
    all_ranks: bool = II("actor_rollout_ref.actor.profiler.all_ranks")
    """Record all ranks."""
    ranks: list[int] = II("actor_rollout_ref.actor.profiler.ranks")
    """Or these."""


@dataclass
class GlobalNsysConfig:
    discrete: bool = False
    """A capture range for each phase, instead of one for the step."""
    controller_nsight_options: dict[str, Any] = refused(NSIGHT_OPTIONS, AROUND_THE_COMMAND)
    worker_nsight_options: dict[str, Any] = refused(
        {
            **NSIGHT_OPTIONS,
            "capture-range": "cudaProfilerApi",
            "capture-range-end": None,
            "kill": "none",
        },
        AROUND_THE_COMMAND,
    )


@dataclass
class GlobalTorchMemoryConfig:
    trace_alloc_max_entries: int = option(100000, minimum=1, unit="events")
    """Newest allocations and releases that a snapshot holds."""
    stack_depth: int = refused(32, WHOLE_STACKS)
    context: str = option("all", choices=("all", "alloc", "state"))
    """Which events have a stack."""
    stacks: str = option("all", choices=("all", "python"))
    """Frames of a stack: those of C++ too, or only Python's."""
    kw_args: dict[str, Any] = mapping()
    """Further arguments of torch.cuda.memory._record_memory_history."""


@dataclass
class GlobalToolConfigs:
    nsys: GlobalNsysConfig = nested(GlobalNsysConfig)
    torch_memory: GlobalTorchMemoryConfig = nested(GlobalTorchMemoryConfig)


@dataclass
class GlobalProfilerConfig:
    """Which steps are recorded, and by which tool."""

    tool: str | None = option(None, choices=TOOLS)
    """nsys, torch or torch_memory; null: nothing is recorded."""
    steps: list[int] | None = None
    """Steps that are recorded, by the roles whose profiler is enabled."""
    profile_continuous_steps: bool = False
    """Consecutive steps are one recording."""
    save_path: str = "outputs/profile"
    """Folder of the files."""
    global_tool_config: GlobalToolConfigs = nested(GlobalToolConfigs)


def check_profilers(whole: GlobalProfilerConfig, roles: Mapping[str, ProfilerConfig]) -> None:
    """What is to be recorded is said completely. `roles`: by the key of each one's profiler."""
    enabled = {key: role for key, role in roles.items() if role.enable}
    if whole.steps and not enabled:
        known = ", ".join(f"{key}.enable" for key in roles)
        raise ConfigError(
            f"global_profiler.steps={whole.steps}: no role is recorded; set one of {known}"
        )
    for key, role in enabled.items():
        if not whole.steps:
            raise ConfigError(f"{key}.enable=True: global_profiler.steps names no step")
        if role.tool is None:
            known = ", ".join(TOOLS)
            raise ConfigError(f"{key}.enable=True: global_profiler.tool is null; takes {known}")
        if not (role.all_ranks or role.ranks):
            raise ConfigError(f"{key}.enable=True: set {key}.all_ranks=True, or {key}.ranks=[0]")
        unknown = [name for name in role.tool_config.torch.contents if name not in TORCH_CONTENTS]
        if unknown:
            known = ", ".join(TORCH_CONTENTS)
            raise ConfigError(f"{key}.tool_config.torch.contents={unknown}: takes {known}")
    tools = {role.tool for role in enabled.values()}
    if len(tools) > 1:
        said = ", ".join(f"{key}.tool={shown(role.tool)}" for key, role in enabled.items())
        raise ConfigError(f"{said}: roles share processes, and one process has one tool")
