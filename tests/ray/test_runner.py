"""The driver of a run as an actor of the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from caldera.config import PPOTrainerConfig
from caldera.errors import ConfigError
from caldera.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    register,
)
from caldera.trainer.ppo.setup import settle
from caldera.trainer.ray_runner import (
    RayGroups,
    connect,
    init_arguments,
    process_environment,
    run_on_ray,
)

pytestmark = pytest.mark.ray


class Role(Worker):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def facts(self) -> list[str]:
        return [self.name, os.getcwd(), os.environ["NCCL_DEBUG"], os.environ["VERL_OWN"]]


def train_twice(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    """Stands for a run that is restarted once."""
    print("this line is for the user")
    recipes = {name: ClassWithInitArgs(Role, name) for name in ("actor", "critic")}
    for part in ("first", "second"):
        groups = make_groups(ResourcePool([1]), recipes)
        found = {name: group.facts()[0] for name, group in groups.items()}
        Path(f"{part}.json").write_text(json.dumps(found))  # where the run was started
        groups["actor"].shutdown()


def make_a_mistake(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    raise ConfigError(f"trainer.nnodes={config.trainer.nnodes}: a mistake")


def do_nothing(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    pass


def have_a_bug(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    raise ZeroDivisionError("a bug")


def config_of(**ray_kwargs: Any) -> PPOTrainerConfig:
    config = PPOTrainerConfig()
    config.trainer.device = "cpu"
    config.ray_kwargs.timeline_json_file = ray_kwargs.get("timeline_json_file")
    return config


def test_a_run_on_the_cluster(
    cluster: Any,
    by_value: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    by_value(__name__)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_OWN", "mine")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run_on_ray(config_of(timeline_json_file="timeline/run.json"), settle, train_twice)
    for part in ("first", "second"):
        found = json.loads((tmp_path / f"{part}.json").read_text())
        assert found == {n: [n, str(tmp_path), "INFO", "mine"] for n in ("actor", "critic")}
    assert json.loads((tmp_path / "timeline/run.json").read_text())
    seen, deadline = "", time.monotonic() + 20
    while "this line is for the user" not in seen:
        assert time.monotonic() < deadline, "Ray forwards what the driver prints"
        time.sleep(0.2)
        seen += capfd.readouterr().out


def test_errors_of_the_driver_are_the_users(cluster: Any, by_value: Any) -> None:
    by_value(__name__)
    with pytest.raises(ConfigError) as mistake:
        run_on_ray(config_of(), settle, make_a_mistake)
    assert str(mistake.value) == "trainer.nnodes=1: a mistake"
    with pytest.raises(ZeroDivisionError, match="have_a_bug"):  # with the actor's traceback
        run_on_ray(config_of(), settle, have_a_bug)


def test_the_clusters_gpus_are_counted(cluster: Any) -> None:
    assert connect(config_of()) is False
    seen = []
    run_on_ray(config_of(), lambda config, gpus: seen.append(gpus), do_nothing)
    assert seen == [2]


def test_a_cluster_that_cannot_be_had(tmp_path: Path) -> None:
    """In a process of its own, since that of the tests is connected."""
    script = tmp_path / "connect.py"
    script.write_text(
        "import json, os, sys\n"
        "from caldera.config import PPOTrainerConfig\n"
        "from caldera.errors import ConfigError\n"
        "from caldera.trainer.ray_runner import connect\n"
        "config = PPOTrainerConfig()\n"
        "for address, config.ray_kwargs.ray_init in json.loads(sys.argv[1]):\n"
        "    os.environ['RAY_ADDRESS'] = address\n"
        "    try:\n"
        "        connect(config)\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    nowhere = "127.0.0.1:9"
    cases = [(nowhere, {}), ("", {"address": nowhere}), ("", {"num_cpus": 1, "no_such": 1})]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        env=environment, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert "ray_kwargs.ray_init={}, RAY_ADDRESS=127.0.0.1:9: no connection to Ray" in first
    assert "Connection refused" in first and "Connection refused" in second
    assert "Unknown keyword argument(s): no_such" in third


def test_the_environment_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("VERL_", "CALDERA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("CALDERA_CACHE", "/cache")
    expected = {
        "CALDERA_CACHE": "/cache",
        "NCCL_DEBUG": "WARN",
        "TOKENIZERS_PARALLELISM": "true",
        "TQDM_DISABLE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    assert process_environment() == expected
    given = {
        "num_cpus": None,
        "address": "auto",
        "runtime_env": {"py_executable": None, "env_vars": {"NCCL_DEBUG": "TRACE", "N": 1}},
    }
    assert init_arguments(given) == {
        "address": "auto",
        "runtime_env": {"env_vars": {**expected, "NCCL_DEBUG": "TRACE", "N": "1"}},
    }
