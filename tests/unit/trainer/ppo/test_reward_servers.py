"""What stands between a run and its servers of reward models."""

from __future__ import annotations

import pickle
import socket
import threading
from typing import Any

import pytest
import torch

from caldera.config import PPOTrainerConfig
from caldera.protocol import DataProto
from caldera.reward import compute_reward
from caldera.reward.model_server import RouterUrl, router_address
from caldera.trainer.ppo.rewards import RewardServers
from caldera.workers.reward_router import Router


def config_of(*urls: str) -> PPOTrainerConfig:
    config = PPOTrainerConfig()
    config.trainer.n_gpus_per_node = 1
    config.reward_model.enable = True
    config.reward_model.rollout.name = "vllm"
    config.reward_model.rollout.url = list(urls)
    return config


def test_several_addresses_become_the_routers() -> None:
    servers = RewardServers(config_of("http://a:1", "http://b:2"))
    try:
        (url,) = pickle.loads(pickle.dumps(servers.config)).reward_model.rollout.url
        assert isinstance(url, RouterUrl)
        assert router_address(servers.config.reward_model) == url.removeprefix("http://")
        assert url.startswith("http://127.0.0.1:"), "without Ray it is for this machine alone"
    finally:
        servers.close()
    (url,) = RewardServers(config_of("http://a:1")).config.reward_model.rollout.url
    assert type(url) is str


def test_a_manager_of_ones_own_may_fail_around_a_model_that_sleeps() -> None:
    class Own:
        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            raise OSError("the judge is away")

    class Sleeping(RewardServers):
        calls: list[str] = []  # noqa: RUF012 -- of one test

        def wake(self) -> None:
            self.calls.append("wake")

        def sleep(self) -> None:
            self.calls.append("sleep")

    servers = Sleeping(config_of("http://a:1"))
    servers._sleeps = True
    data = DataProto.from_dict({"responses": torch.ones(2, 3)})
    rewards, extra = compute_reward(data, servers.awake(Own()))
    assert not rewards.any() and extra["reward_state"] == ["failed", "failed"]
    assert servers.calls == ["wake", "sleep"]


@pytest.mark.timeout(60)
def test_a_request_under_way_does_not_keep_the_process_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = set(threading.enumerate())
        router = Router("127.0.0.1", [f"127.0.0.1:{silent.getsockname()[1]}"])
        host, _, port = router.address.partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            connection, _ = silent.accept()
            started = set(threading.enumerate()) - before
            assert any(thread.name == "_forward" for thread in started)
            assert all(thread.daemon for thread in started)
            connection.close()
        router.close()
