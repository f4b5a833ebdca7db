"""Reports on ranks of a Ray cluster when one of them has failed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from caldera.single_controller._ray import ray_module
from caldera.single_controller.failure import (
    RankFailure,
    WaitingRank,
    last_lines,
    request_stack,
    silence_failure,
)
from caldera.single_controller.ray_actor import Location

LOOK_S = 30.0
"""How long it may take to see what the ranks on other nodes are doing."""
RAY_MARK = ":"
"""How the lines begin that Ray itself writes into the log of a process, such as :job_id:01."""
COLLECTIVES = os.path.join("torch", "distributed")
MISSED = "no answer, while others waited for it in a collective"
KILLED = "its process was killed, or crashed (the kernel kills when memory runs out)"
NODE_DIED = "its node has died"
UNREACHABLE = "its process cannot be reached"
Lines: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """The visible state of a rank."""

    stack: Lines = ()
    """The frames of its main thread, the innermost last."""
    log_lines: Lines = ()
    """The last lines of its log."""
    log: str | None = None
    """Where its log is: a path, after the address of the node unless it is this one."""
    gone: str | None = None
    """The fate of a rank that is not there any more."""


def tell(
    failures: Mapping[int, RankFailure],
    methods: Mapping[int, str],
    locations: Mapping[int, Location],
    silent_s: float,
) -> tuple[list[RankFailure], list[WaitingRank]]:
    """The failures of ranks with their logs, and the ranks that were still in a call (rank ->
    method) with their stacks. No failure means silence: the rank that keeps the others waiting."""
    seen = look_at_all({r: at for r, at in locations.items() if r in {*methods, *failures}})
    told = []
    for rank, failure in failures.items():
        sight = seen.get(rank, Sight())
        is_unknown = failure.what.startswith(UNREACHABLE)
        what = (sight.gone if is_unknown else None) or failure.what
        details = failure.details or sight.log_lines
        told.append(replace(failure, what=what, details=details, log=sight.log))
    waiting = []
    for rank, method in sorted(methods.items()):
        sight = seen.get(rank, Sight())
        if sight.gone:  # Ray has not reported that yet
            told.append(RankFailure(rank, method, sight.gone, sight.log_lines, sight.log))
        else:
            waiting.append(WaitingRank(rank, method, sight.stack, sight.log))
    if waiting and all(failure.in_collective for failure in told):  # or there is none
        silent = silence_failure(sorted(waiting, key=lambda rank: bool(rank.stack)), silent_s)
        if not told:
            told = [silent]
        elif not any(COLLECTIVES in line for line in silent.details):
            told.append(replace(silent, what=MISSED))
    return told, waiting


def look_at_all(locations: Mapping[int, Location]) -> dict[int, Sight]:
    """Of each rank what is to be seen, also on other nodes as far as they still respond."""
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
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    sights = {}
    for rank, location in locations.items():
        if rank not in asked:
            sights[rank] = look_at(location)
            continue
        sight = _answer(asked[rank])
        sights[rank] = replace(
            sight,
            log=f"{location.address}:{location.log}",
            gone=sight.gone if location.node_id in alive else NODE_DIED,
        )
    return sights


def look_at(location: Location) -> Sight:
    """The visible state of a rank on this node."""
    stack = request_stack(location.pid, Path(location.stack_file))
    of_ray = os.path.dirname(ray_module().__file__)
    lines = (line for line in last_lines(location.log) if not line.startswith(RAY_MARK))
    return Sight(
        tuple(line for line in stack if of_ray not in line),
        tuple(lines),
        location.log,
        None if _is_running(location.pid) else KILLED,
    )


def reason_of(error: Exception) -> str:
    """Why Ray has no result, in a line or two."""
    exceptions = ray_module("ray.exceptions")
    if isinstance(error, exceptions.RayTaskError):  # outside of the worker's own code
        return f"{type(error.cause).__name__}: {error.cause}"
    text = " ".join(str(error).split())
    if isinstance(error, exceptions.ActorUnavailableError):
        rpc_error = re.search(r"RPC error: (.*?) rpc_code", text)
        return f"{UNREACHABLE}: {rpc_error[1] if rpc_error else text}"
    cause = re.search(r"(?:dead|died) because (.*?)(?: Some common causes|$)", text)
    if "Worker unexpectedly exits" in text:  # Ray does not know how
        return KILLED
    return f"its process is gone: {cause[1] if cause else text}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _answer(asked: Any) -> Sight:
    try:
        sight: Sight = ray_module().get(asked, timeout=0)
    except ray_module("ray.exceptions").RayError:  # the node is gone, or does not answer
        return Sight()
    return sight
