"""Keys of the reward model and of its server that have to fit together."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig
from caldera.config.reward import check_native_model
from caldera.errors import ConfigError

Load = Callable[..., PPOTrainerConfig]
ON = "reward_model.enable=True"
NATIVE = "reward_model.rollout.name=native"
SGLANG = "reward_model.rollout.name=sglang"
AT_A = "reward_model.rollout.url=http://a:1"
BY_ROWS = "reward_model.micro_batch_size_per_gpu=4"


@pytest.mark.parametrize(
    ("overrides", "served", "has_worker", "sleeps"),
    [
        ((BY_ROWS,), False, True, False),
        ((NATIVE,), True, True, True),
        ((NATIVE, "reward_model.rollout.free_cache_engine=False"), True, True, False),
        (
            (NATIVE, "reward_model.enable_resource_pool=True", "reward_model.nnodes=1"),
            True, True, False,
        ),
        ((SGLANG, "reward_model.rollout.url=http://a:1"), True, False, False),
    ],
)  # fmt: skip
def test_where_a_model_is(
    load: Load, overrides: tuple[str, ...], served: bool, has_worker: bool, sleeps: bool
) -> None:
    config = load(ON, *overrides).reward_model
    assert (config.is_served, config.has_worker, config.sleeps) == (served, has_worker, sleeps)


def test_without_a_reward_model_nothing_is_served(load: Load) -> None:
    config = load(NATIVE).reward_model
    assert (config.is_served, config.has_worker, config.sleeps) == (False, False, False)


def test_an_address_is_a_list_of_one(load: Load) -> None:
    one = load(ON, SGLANG, "reward_model.rollout.url=http://a:1").reward_model.rollout.url
    two = load(ON, SGLANG, "reward_model.rollout.url=[http://a:1,https://b/x]").reward_model
    assert one == ["http://a:1"]
    assert two.rollout.url == ["http://a:1", "https://b/x"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((NATIVE, AT_A), "reward_model.rollout.url='http://a:1': "),
        ((BY_ROWS, AT_A), "reward_model.rollout.url='http://a:1': "),
        ((SGLANG, AT_A, "reward_model.max_length=9"), "reward_model.max_length=9: "),
        (
            (NATIVE, "reward_model.model.input_tokenizer=null"),
            "reward_model.model.input_tokenizer=null: ",
        ),
        ((SGLANG,), "reward_model.rollout.url=null: "),
        ((SGLANG, "reward_model.rollout.url=a:1"), "reward_model.rollout.url='a:1': "),
        ((SGLANG, "reward_model.rollout.url=[http://a,2]"), "reward_model.rollout.url="),
        (
            (SGLANG, "reward_model.rollout.url=http://a", "reward_model.enable_resource_pool=True"),
            "reward_model.enable_resource_pool=True: ",
        ),
        (
            (NATIVE, "reward_model.ulysses_sequence_parallel_size=2"),
            "reward_model.ulysses_sequence_parallel_size=2: ",
        ),
        (("reward_model.rollout.name=trtllm",), "reward_model.rollout.name='trtllm': takes one of"),
        ((NATIVE, "reward_model.rollout.dtype=float16"), "reward_model.rollout.dtype='float16': "),
        (
            (SGLANG, AT_A, "reward_model.rollout.dtype=float32"),
            "reward_model.rollout.dtype='float32' is not supported: a classifier is",
        ),
        (
            (NATIVE, "reward_model.rollout.tensor_model_parallel_size=4"),
            "reward_model.rollout.tensor_model_parallel_size=4 is not supported: every rank serves",
        ),
    ],
)
def test_what_does_not_fit(load: Load, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load(ON, *overrides)


@pytest.mark.parametrize(
    "key",
    ["dtype=float32", "gpu_memory_utilization=0.7", "prompt_length=64", "response_length=8"],
)
def test_keys_of_language_models(load: Load, key: str) -> None:
    """Whether they are honoured is known once the model's files have been seen."""
    config = load(ON, NATIVE, f"reward_model.rollout.{key}", "custom_reward_function.path=judge.py")
    check_native_model(config, is_language_model=True)
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^reward_model.rollout.{name}=.* is not supported: a "):
        check_native_model(config, is_language_model=False)
    with pytest.raises(ConfigError, match=f"^reward_model.rollout.{name}=.* is not supported: a "):
        load(f"reward_model.rollout.{key}")


def test_a_language_model_needs_somebody_who_asks_it(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"^custom_reward_function.path=null: .* takes /x/y\.py"):
        check_native_model(load(ON, NATIVE), is_language_model=True)
    manager = ("reward_manager.source=importlib", "reward_manager.module.path=manager.py")
    check_native_model(load(ON, NATIVE, *manager), is_language_model=True)
    cut = load(ON, NATIVE, "custom_reward_function.path=judge.py", "reward_model.max_length=9")
    with pytest.raises(ConfigError, match=r"^reward_model.max_length=9: "):
        check_native_model(cut, is_language_model=True)
