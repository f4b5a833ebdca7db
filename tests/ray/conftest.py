"""One Ray for the whole folder: a head node with 4 CPUs and 2 GPUs that exist on paper alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # what Ray would otherwise warn of

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

REPOSITORY = Path(__file__).parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ray: starts a Ray of its own")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "num_gpus": 2, "include_dashboard": False},
    )
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def by_value() -> Callable[[str], ModuleType]:
    """Have Ray send the classes of a test file whole: its actors cannot import it."""

    def register(module_name: str) -> ModuleType:
        module = sys.modules[module_name]
        ray.cloudpickle.register_pickle_by_value(module)
        return module

    return register
