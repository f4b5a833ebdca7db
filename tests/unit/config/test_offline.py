"""Ranks that share an engine of a generation come in whole groups."""

from __future__ import annotations

import re

import pytest

from caldera.commands.eval import EVALUATE
from caldera.config import compose_config
from caldera.config.offline import GenerationConfig, check_generation, resolve_generation
from caldera.errors import ConfigError

TENSOR_PARALLEL = "rollout.tensor_model_parallel_size"


def config_of(*overrides: str) -> GenerationConfig:
    required = ["model.path=model", "data.path=prompts.parquet", "data.output_path=out.parquet"]
    given = [*required, "rollout.name=vllm", *overrides]
    return compose_config(given, "generation", None, GenerationConfig)


@pytest.mark.parametrize(
    ("devices", "nodes", "engine"), [(4, 1, 2), (4, 1, 4), (4, 2, 4), (1, 1, 2)]
)
def test_an_engine_over_whole_groups(devices: int, nodes: int, engine: int) -> None:
    check_generation(
        config_of(
            f"trainer.n_gpus_per_node={devices}",
            f"trainer.nnodes={nodes}",
            f"{TENSOR_PARALLEL}={engine}",
        )
    )


@pytest.mark.parametrize(
    ("devices", "nodes", "told"),
    [
        (3, 1, "=2 does not divide the 3 ranks (trainer.n_gpus_per_node x trainer.nnodes)"),
        (3, 2, "=2 does not divide trainer.n_gpus_per_node=3: the ranks of one vllm engine are on"),
        (1, 2, "=2 does not divide trainer.n_gpus_per_node=1: the ranks of one vllm engine are on"),
    ],
)
def test_other_ranks_are_refused_before_a_model_is_loaded(
    devices: int, nodes: int, told: str
) -> None:
    config = config_of(
        f"trainer.n_gpus_per_node={devices}", f"trainer.nnodes={nodes}", f"{TENSOR_PARALLEL}=2"
    )
    with pytest.raises(ConfigError, match=re.escape(TENSOR_PARALLEL + told)):
        check_generation(config)


def test_the_devices_of_the_machine_are_checked_too() -> None:
    config = config_of(f"{TENSOR_PARALLEL}=2", "trainer.worker_group=local")
    check_generation(config)
    with pytest.raises(ConfigError, match=re.escape(f"{TENSOR_PARALLEL}=2 does not divide the 3")):
        resolve_generation(config, gpus=3)


def test_an_evaluation_refuses_the_name_of_a_function_without_its_file() -> None:
    function = "custom_reward_function"
    data = "data.path=out.parquet"
    EVALUATE.load([data, f"{function}.path=x.py", f"{function}.name=score"], "evaluation", None)
    with pytest.raises(ConfigError, match=rf"{function}\.name='score': needs {function}\.path="):
        EVALUATE.load([data, f"{function}.name=score"], "evaluation", None)
