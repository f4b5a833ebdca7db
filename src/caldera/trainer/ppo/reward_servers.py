"""The servers of reward models that a run uses: where they are, and when they are awake."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from caldera.config import PPOTrainerConfig, uses_ray
from caldera.protocol import DataProto
from caldera.reward import RewardManager
from caldera.reward.manager import RewardResult
from caldera.reward.model_server import RouterUrl
from caldera.single_controller import Role, WorkerGroup
from caldera.single_controller._ray import ray_module
from caldera.single_controller.in_process import InProcessWorkerGroup
from caldera.workers.reward_router import Router


class RewardServers:
    """One address for all servers of reward models, those of the run's own ranks or others.

    The address is known before the ranks are: score functions are made with it.
    """

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._router: Router | None = None
        self._group: WorkerGroup | None = None
        self._sleeps = config.reward_model.sleeps
        self.config = config
        """The run's config, with the address in `reward_model.rollout.url`."""
        reward_model = config.reward_model
        others: list[str] = [] if reward_model.has_worker else reward_model.rollout.url or []
        if reward_model.is_served and len(others) != 1:
            self._router = Router(_host(config), others)
            self.config = copy.deepcopy(config)
            self.config.reward_model.rollout.url = [RouterUrl(f"http://{self._router.address}")]

    def start(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Have the ranks serve, where the model is theirs."""
        if self.config.reward_model.is_served and Role.RewardModel.value in groups:
            assert self._router is not None, "a model of the run's own stands behind a router"
            self._group = groups[Role.RewardModel.value]
            self._router.use(self._group.serve())

    def awake(self, manager: RewardManager) -> RewardManager:
        """The manager, around whose calls a model that sleeps is awake."""
        return _Awake(self, manager) if self._sleeps else manager

    def wake(self) -> None:
        assert self._group is not None, "start comes first"
        self._group.wake()

    def sleep(self) -> None:
        assert self._group is not None, "start comes first"
        self._group.sleep()

    def close(self) -> None:
        """Requests find nobody from now on; servers in other processes end with these."""
        if self._router is not None:
            self._router.close()
        if isinstance(self._group, InProcessWorkerGroup):
            self._group.stop_serving()


class _Awake:
    def __init__(self, servers: RewardServers, manager: RewardManager) -> None:
        self._servers = servers
        self.__wrapped__ = manager  # what it raises is judged by whose it is

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | RewardResult:
        self._servers.wake()
        try:
            return self.__wrapped__(data, return_dict=return_dict)
        finally:
            self._servers.sleep()


def _host(config: PPOTrainerConfig) -> str:
    """The address of this machine that all ranks can reach."""
    if not uses_ray(config):
        return "127.0.0.1"
    return str(ray_module("ray.util").get_node_ip_address())
