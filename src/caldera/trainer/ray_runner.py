"""A run on a Ray cluster: the driver is an actor of the cluster, and so is every rank."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from caldera.config import PPOTrainerConfig, SFTTrainerConfig
from caldera.config.offline import GenerationConfig
from caldera.errors import CalderaError, ConfigError, WorkerError
from caldera.single_controller import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
)
from caldera.single_controller._ray import ray_module
from caldera.single_controller.ray_actor import enter
from caldera.single_controller.ray_failure import reason_of
from caldera.single_controller.ray_group import RayWorkerGroup
from caldera.single_controller.ray_pool import (
    SECONDS_TO_LOOK,
    RayResourcePool,
    check_room,
    gpus_per_node,
)
from caldera.single_controller.resource_pool import Slot
from caldera.storage.writing import written_aside
from caldera.trainer.bundle import COMMAND_VARIABLE
from caldera.trainer.groups import timeout_of

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "NCCL_DEBUG": "WARN",
    "TOKENIZERS_PARALLELISM": "true",
    "TQDM_DISABLE": "1",  # bars that Ray would forward line by line, of every rank
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_LOGGING_LEVEL": "WARN",
}
"""Variables of every process of a run; those of the user's shell and config win."""
DRIVER_CPUS = 1
FORWARDING_S = 2.0
"""How long Ray may take to forward the last lines that the driver wrote."""
REACH_S = 10.0
"""How long the cluster's address may take to answer."""
OWN_PREFIXES = (
    "AWS_",
    "AZURE_",
    "CALDERA_",
    "CLEARML_",
    "FSSPEC_",
    "GOOGLE_",
    "HF_",
    "MLFLOW_",
    "SWANLAB_",
    "TENSORBOARD_",
    "TRACKIO_",
    "VERL_",
    "WANDB_",
)
"""Variables of the user's shell that hold in all processes: Caldera's, and those of stores and
loggers."""


RunConfig: TypeAlias = PPOTrainerConfig | SFTTrainerConfig | GenerationConfig
C = TypeVar("C", PPOTrainerConfig, SFTTrainerConfig, GenerationConfig)


class RayGroups:
    """Makes the groups of a run. The roles of a pool share its actors, one for each rank."""

    def __init__(self, config: RunConfig, folder: str) -> None:
        self.config = config
        self.folder = folder
        self._pools: dict[tuple[Slot, ...], RayResourcePool] = {}

    def __call__(
        self, pool: ResourcePool, recipes: dict[str, ClassWithInitArgs]
    ) -> dict[str, WorkerGroup]:
        places, trainer = tuple(pool.slots), self.config.trainer
        on_ray = _pool(self.config, pool.store)
        if places in self._pools:  # of groups that have failed: a node may be gone
            self._pools.pop(places).release()
            _wait_for_nodes(on_ray, trainer.ray_wait_register_center_timeout)
        self._pools[places] = on_ray
        whole = RayWorkerGroup(
            on_ray,
            create_colocated_worker_cls(recipes),
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            timeout_s=timeout_of(self.config),
            folder=self.folder,
            name="_".join(recipes),
        )
        return whole.spawn(recipes)

    def release(self) -> None:
        """Give the places back: Ray itself would wait for the end of the user's process."""
        for pool in self._pools.values():
            pool.release()


Settle: TypeAlias = Callable[[C, int], None]
"""Fills in what depends on the GPUs of a node, here where the run is started."""
BuildAndFit: TypeAlias = Callable[[C, RayGroups], None]
"""Builds the trainer, whose groups are made by the second argument, and trains."""


class TaskRunner:
    """The driver. It needs no GPU, and holds one CPU for the length of the run."""

    def run(self, config: C, build_and_fit: BuildAndFit[C], folder: str) -> None:
        # Ray forwards what is written here, line by line, to the user's terminal.
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        level = os.environ.get("VERL_LOGGING_LEVEL", "INFO").upper()
        logging.getLogger("caldera").setLevel(level)
        enter(folder)
        groups = RayGroups(config, folder)
        try:
            build_and_fit(config, groups)
        finally:
            groups.release()

    def __repr__(self) -> str:
        return "caldera"  # what Ray puts before each line


def run_on_ray(config: C, settle: Settle[C], build_and_fit: BuildAndFit[C]) -> None:
    """Train on a cluster; see `connect`.

    `build_and_fit` runs in an actor: it must be a function that can be imported there.
    """
    # The bundle is written by the driver, whose command line is another one.
    os.environ.setdefault(COMMAND_VARIABLE, json.dumps(sys.orig_argv))
    is_own = connect(config)
    try:
        settle(config, gpus_per_node())
        check_room(_pools(config), {"CPU": DRIVER_CPUS})
        _drive(config, build_and_fit, {} if is_own else {"env_vars": process_environment()})
    finally:
        if is_own:
            ray_module().shutdown()


def _pools(config: RunConfig) -> list[RayResourcePool]:
    """What a run will reserve."""
    trainer = config.trainer
    sizes = [[trainer.n_gpus_per_node or 1] * trainer.nnodes]
    if isinstance(config, PPOTrainerConfig):
        reward_model = config.reward_model
        if reward_model.enable and reward_model.enable_resource_pool:
            sizes.append([reward_model.n_gpus_per_node] * reward_model.nnodes)
    return [_pool(config, size) for size in sizes]


def _pool(config: RunConfig, processes_on_nodes: list[int]) -> RayResourcePool:
    on_gpus = config.trainer.device == "cuda"
    return RayResourcePool(processes_on_nodes, use_gpu=on_gpus, max_colocate_count=1)


def _wait_for_nodes(pool: RayResourcePool, wait_s: float) -> None:
    """Give a cluster that has lost a node the time to replace it."""
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            pool.check_capacity()
            return
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if not told:
                logger.warning("waiting for a node to come back: %s", error)
        told = True
        time.sleep(SECONDS_TO_LOOK)


def _drive(config: C, build_and_fit: BuildAndFit[C], runtime_env: dict[str, Any]) -> None:
    ray, errors = ray_module(), ray_module("ray.exceptions")
    driver = ray.remote(TaskRunner).options(num_cpus=DRIVER_CPUS, runtime_env=runtime_env).remote()
    try:
        ray.get(driver.run.remote(config, build_and_fit, os.getcwd()))
        time.sleep(FORWARDING_S)
    except errors.RayTaskError as error:
        if isinstance(error.cause, CalderaError):
            raise error.cause from error
        raise
    except errors.RayActorError as error:
        raise WorkerError(f"the driver has failed: {reason_of(error)}") from error
    finally:
        ray.kill(driver)
        _write_timeline(config.ray_kwargs.timeline_json_file)


def connect(config: RunConfig) -> bool:
    """Connect to Ray, unless this process is: whether it is this call that did.

    The cluster is that of `ray_kwargs.ray_init.address` or of RAY_ADDRESS; else the one that this
    machine belongs to; else a new one of this machine alone.
    """
    ray = ray_module()
    if ray.is_initialized():
        return False
    # `ray job submit` gives variables too; Ray would refuse those that are among ours.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    arguments = init_arguments(config.ray_kwargs.ray_init)
    address = arguments.get("address") or os.environ.get("RAY_ADDRESS") or None
    is_open = address is None and "num_cpus" not in arguments
    try:
        _reach(address)
        if not (is_open and _connect_to_this_machines(arguments)):
            if is_open:  # Ray's CPUs are places: the driver takes one besides the ranks
                places = DRIVER_CPUS + sum(max(pool.store) for pool in _pools(config))
                arguments |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, places)}
            ray.init(**arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        given = _without_nulls(config.ray_kwargs.ray_init)
        given = {name: "..." if name == "runtime_env" else value for name, value in given.items()}
        raise ConfigError(
            f"ray_kwargs.ray_init={given}, RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: "
            f"no connection to Ray: {error}"
        ) from error
    return True


def process_environment() -> dict[str, str]:
    """The variables that every process of a run has."""
    own = {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith(OWN_PREFIXES)}
    return ENVIRONMENT | own


def init_arguments(ray_init: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `ray.init`: what the config gives, less nulls, plus the environment."""
    given = _without_nulls(ray_init)
    runtime_env = dict(given.get("runtime_env", {}))
    variables = {key: str(value) for key, value in runtime_env.get("env_vars", {}).items()}
    runtime_env["env_vars"] = process_environment() | variables
    return given | {"runtime_env": runtime_env}


def _reach(address: str | None) -> None:
    """See that something answers at host:port: Ray itself would try for minutes, then exit."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        host = host.rpartition("/")[2].strip("[]")  # also of ray://host:port and [::1]:port
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _connect_to_this_machines(arguments: dict[str, Any]) -> bool:
    """Connect to the cluster that runs on this machine; whether there is one."""
    try:
        ray_module().init(address="auto", **arguments)
    except ConnectionError:
        return False
    return True


def _write_timeline(file: str | None) -> None:
    if file is not None:
        with written_aside(Path(file).expanduser()) as aside:
            ray_module().timeline(str(aside))


def _without_nulls(arguments: dict[str, Any]) -> dict[str, Any]:
    items = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in arguments.items()}
    return {key: value for key, value in items.items() if value is not None}
