"""The driver of a run as an actor of the cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from caldera.config import PPOTrainerConfig, load_config
from caldera.errors import ConfigError, WorkerError
from caldera.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    register,
)
from caldera.trainer.ppo.setup import settle
from caldera.trainer.ray_runner import (
    OWN_PREFIXES,
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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dawdle(self) -> None:
        time.sleep(600 * self.rank)


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


def have_a_bug(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    raise ZeroDivisionError("a bug")


def lose_the_driver(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    group = make_groups(ResourcePool([1]), {"actor": ClassWithInitArgs(Role, "actor")})["actor"]
    Path("processes").write_text(json.dumps(group.process()))
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_rank(config: PPOTrainerConfig, make_groups: RayGroups) -> None:
    group = make_groups(ResourcePool([2]), {"actor": ClassWithInitArgs(Role, "actor")})["actor"]
    Path("processes").write_text(json.dumps(group.process()))
    group.dawdle()


def wait_until_gone() -> None:
    """Until the ranks that a run has noted here have ended."""
    deadline = time.monotonic() + 60
    for process in json.loads(Path("processes").read_text()):
        while Path(f"/proc/{process}").exists():
            assert time.monotonic() < deadline, "an orphan"
            time.sleep(0.1)


def reservations() -> list[str]:
    """The names of the reservations that somebody has."""
    groups = ray.util.placement_group_table().values()
    return [group["name"] for group in groups if group["state"] != "REMOVED"]


def config_of(*overrides: str) -> PPOTrainerConfig:
    return load_config(
        [
            "data.train_files=none.parquet", "data.val_files=none.parquet",
            "actor_rollout_ref.model.path=none", "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "trainer.device=cpu", *overrides,
        ]
    )  # fmt: skip


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
    run_on_ray(config_of("ray_kwargs.timeline_json_file=timeline/run.json"), settle, train_twice)
    for part in ("first", "second"):
        found = json.loads((tmp_path / f"{part}.json").read_text())
        assert found == {n: [n, str(tmp_path), "INFO", "mine"] for n in ("actor", "critic")}
    assert json.loads((tmp_path / "timeline/run.json").read_text())
    assert reservations() == []
    seen, deadline = "", time.monotonic() + 60
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


def test_a_driver_that_dies_takes_its_ranks_along(
    cluster: Any, by_value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_value(__name__)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"^the driver has failed: its process was killed"):
        run_on_ray(config_of(), settle, lose_the_driver)
    wait_until_gone()
    for name in reservations():  # Ray keeps them as long as these tests run
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def test_a_rank_that_never_answers(
    cluster: Any, by_value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_value(__name__)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError) as error:
        run_on_ray(config_of("actor_rollout_ref.nccl_timeout=10"), settle, wait_for_a_rank)
    head, what, frame, log, *_ = str(error.value).splitlines()
    assert head == "worker group actor: rank 1 of 2 failed in actor_dawdle"
    assert what == "  no answer for 10 s" and frame.endswith("in dawdle")
    assert Path(log.removeprefix("  log: ")).is_file()
    wait_until_gone()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("trainer.n_gpus_per_node=8", r"1 nodes of 8 processes \(8 CPU each\); .* room for 0 \("),
        ("trainer.nnodes=4", r"the run asks for 5 CPU \(.*\); the Ray cluster has 4 CPU$"),
    ],
)
def test_what_the_cluster_has_not_is_refused_before_there_is_a_driver(
    cluster: Any, asked: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_on_ray(config_of(asked), settle, have_a_bug)


def test_the_clusters_gpus_are_counted(cluster: Any) -> None:
    def count(config: PPOTrainerConfig, gpus: int) -> None:
        raise ConfigError(f"the cluster has {gpus} GPUs")

    assert connect(config_of()) is False
    with pytest.raises(ConfigError, match="the cluster has 2 GPUs"):
        run_on_ray(config_of(), count, have_a_bug)


def test_connections(cluster: Any, tmp_path: Path) -> None:
    """In a process of its own, since that of the tests is connected."""
    script = tmp_path / "connect.py"
    script.write_text(
        "import json, os, ray, sys\n"
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
        "print(ray.get_runtime_context().runtime_env['env_vars'])"
    )
    nowhere = "127.0.0.1:9"
    cases = [
        (nowhere, {}), ("", {"address": nowhere}), ("", {"num_cpus": 1, "no_such": 1}),
        (cluster.address, {}),
    ]  # fmt: skip
    # As `ray job submit` starts a process: its variables may be among ours.
    job = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO", "OF_THE_JOB": "1"}}}
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
        "NCCL_DEBUG": "INFO",
        "OF_THE_JOB": "1",
    }
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)],
        env=environment, text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, third, variables = done.stdout.splitlines()
    assert "ray_kwargs.ray_init={}, RAY_ADDRESS=127.0.0.1:9: no connection to Ray" in first
    assert "Connection refused" in first and "Connection refused" in second
    assert "Unknown keyword argument(s): no_such" in third
    assert "'NCCL_DEBUG': 'INFO'" in variables and "'OF_THE_JOB': '1'" in variables
    assert "'TQDM_DISABLE': '1'" in variables


def test_the_environment_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OWN_PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("CALDERA_CACHE", "/cache")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    expected = {
        "AWS_PROFILE": "mine",
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
