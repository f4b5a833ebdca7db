"""What can be told of ranks on a Ray cluster when one of them has failed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from caldera.single_controller._ray import ray_module
from caldera.single_controller.failure import last_lines, request_stack
from caldera.single_controller.ray_actor import Location

LOOK_S = 30.0
"""How long it may take to see what the ranks on other nodes are doing."""
RAY_MARK = ":"
"""How the lines begin that Ray itself writes into the log of a process, such as :job_id:01."""
Lines: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """What is to be seen of a rank."""

    stack: Lines
    """What its main thread is doing, the innermost frame last."""
    log_lines: Lines
    """The last lines of its log."""
    log: str | None
    """Where its log is: a path, after the address of the node unless it is this one."""


UNSEEN = Sight((), (), None)


def look_at_all(locations: Mapping[int, Location]) -> dict[int, Sight]:
    """Of each rank what is to be seen, also on other nodes as far as they still answer."""
    ray = ray_module()
    strategies = ray_module("ray.util.scheduling_strategies")
    here = ray.get_runtime_context().get_node_id()
    asked = {}
    for rank, location in locations.items():
        if location.node_id != here:
            there = strategies.NodeAffinitySchedulingStrategy(location.node_id, soft=False)
            task = ray.remote(look_at).options(num_cpus=0, scheduling_strategy=there)
            asked[rank] = task.remote(location)
    if asked:
        ray.wait([*asked.values()], num_returns=len(asked), timeout=LOOK_S)
    sights = {}
    for rank, location in locations.items():
        if rank in asked:
            stack, lines = _answer(asked[rank])
            sights[rank] = Sight(stack, lines, f"{location.address}:{location.log}")
        else:
            sights[rank] = Sight(*look_at(location), location.log)
    return sights


def look_at(location: Location) -> tuple[Lines, Lines]:
    """The stack of a rank's main thread and the end of its log; to be called on its node."""
    stack = request_stack(location.pid, Path(location.stack_file))
    of_ray = os.path.dirname(ray_module().__file__)
    log = (line for line in last_lines(location.log) if not line.startswith(RAY_MARK))
    return tuple(line for line in stack if of_ray not in line), tuple(log)


def reason_of(error: Exception) -> str:
    """Why Ray has no answer, in a line or two."""
    exceptions = ray_module("ray.exceptions")
    if isinstance(error, exceptions.RayTaskError):  # outside of the worker's own code
        return f"{type(error.cause).__name__}: {error.cause}"
    text = " ".join(str(error).split())
    cause = re.search(r"(?:dead|died) because (.*?)(?: Some common causes|$)", text)
    if "Worker unexpectedly exits" in text:  # Ray does not know how
        return "its process was killed, or crashed (the kernel kills when memory runs out)"
    return f"its process is gone: {cause[1] if cause else text}"


def _answer(asked: Any) -> tuple[Lines, Lines]:
    try:
        answer: tuple[Lines, Lines] = ray_module().get(asked, timeout=0)
    except ray_module("ray.exceptions").RayError:  # the node is gone, or does not answer
        return (), ()
    return answer
