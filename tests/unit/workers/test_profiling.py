"""Recordings of steps and phases, by torch's profiler on a CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import cast

import pytest

from caldera.config.profiling import GlobalTorchMemoryConfig, ProfilerConfig
from caldera.single_controller import Dispatch, register
from caldera.workers.profiling import ProfiledWorker, profiled

MEMORY = GlobalTorchMemoryConfig()


class Roles(ProfiledWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @profiled("actor")
    def update_actor(self, value: int) -> int:
        return value + 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @profiled("ref")
    def compute_ref_log_prob(self) -> None:
        """Another phase."""


def role(folder: Path, **values: object) -> ProfilerConfig:
    config = ProfilerConfig(tool="torch", enable=True, ranks=[0], save_path=str(folder))
    config.tool_config.nsys.discrete = False
    for name, value in values.items():
        setattr(config, name, value)
    return config


def one_step(worker: Roles) -> None:
    worker.start_profile("step_3", MEMORY)
    assert worker.update_actor(1) == 2
    worker.compute_ref_log_prob()
    worker.stop_profile()


def names_in(file: Path) -> set[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["name"] for event in events}


def test_a_step_is_one_file_with_its_phases_marked(tmp_path: Path) -> None:
    worker = Roles({"actor": role(tmp_path), "ref": role(tmp_path, enable=False)})
    worker.update_actor(1)  # not recorded
    one_step(worker)
    (file,) = tmp_path.rglob("*.gz")
    assert file.relative_to(tmp_path) == Path("step_3/actor_rank_0.json.gz")
    assert {"update_actor", "compute_ref_log_prob"} <= names_in(file)


def test_discrete_roles_have_a_file_for_each_phase(tmp_path: Path) -> None:
    config = role(tmp_path)
    config.tool_config.torch.discrete = True
    one_step(Roles({"actor": config, "ref": role(tmp_path, enable=False)}))
    (file,) = tmp_path.rglob("*.gz")
    assert file.name == "actor_update_actor_rank_0.json.gz"
    assert "update_actor" in names_in(file) and "compute_ref_log_prob" not in names_in(file)


def test_workers_of_one_process_share_a_recording(tmp_path: Path) -> None:
    actor, critic = Roles({"actor": role(tmp_path)}), Roles({"critic": role(tmp_path)})
    for worker in (actor, critic):
        worker.start_profile("step_1", MEMORY)
    critic.update_actor(1)
    for worker in (actor, critic):
        worker.stop_profile()
    (file,) = tmp_path.rglob("*.gz")
    assert "update_actor" in names_in(file)


@pytest.mark.parametrize("values", [{"ranks": [1]}, {"enable": False}])
def test_other_ranks_and_roles_record_nothing(tmp_path: Path, values: dict[str, object]) -> None:
    one_step(Roles({"actor": role(tmp_path, **values)}))
    assert not list(tmp_path.iterdir())


def test_a_phase_that_raises_ends_its_recording(tmp_path: Path) -> None:
    config = role(tmp_path)
    config.tool_config.torch.discrete = True
    worker = Roles({"actor": config})
    worker.start_profile("step_1", MEMORY)
    with pytest.raises(TypeError):
        worker.update_actor(cast(int, "no number"))
    worker.update_actor(1)
    worker.stop_profile()
    assert len(list(tmp_path.rglob("*.gz"))) == 1  # the second has the first one's name
