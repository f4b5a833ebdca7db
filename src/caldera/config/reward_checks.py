"""Checks of the reward model's keys that need more than one of them."""

from __future__ import annotations

import urllib.parse

from caldera.config.fields import as_list, shown
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.reward import RewardModelConfig
from caldera.errors import ConfigError, UnsupportedError

URL = "reward_model.rollout.url"
OF_WRITERS: dict[str, tuple[tuple[object, ...], str]] = {
    "dtype": ((None, "bfloat16"), "a classifier is bfloat16 on a GPU and float32 on a CPU"),
    "gpu_memory_utilization": ((0.5,), "a classifier reads a sequence once and keeps no cache"),
    "prompt_length": ((2048,), "a classifier generates nothing"),
    "response_length": ((2048,), "a classifier generates nothing"),
}
"""Keys of language models -> (values that may be given for other models too, why no others)."""


def check_native_model(config: PPOTrainerConfig, is_language_model: bool) -> None:
    """Keys fit the kind of model that this run serves, which only its files tell."""
    model = config.reward_model
    if not is_language_model:
        _check_no_writer(model)
        return
    what = f"reward_model.model.path={model.model.path!r} is a language model"
    if config.custom_reward_function.path is None and config.reward_manager.source == "register":
        raise ConfigError(
            f"custom_reward_function.path=null: {what}, which gives text and no scores: give the "
            "Python file of a function that asks it, at the argument reward_router_address, and "
            "makes a score of what it says; takes /x/y.py, file:///x/y.py or pkg://a.b.c"
        )
    if model.max_length is not None:
        raise ConfigError(
            f"reward_model.max_length={model.max_length}: {what}, and reads prompts whole; takes "
            "null; reward_model.rollout.prompt_length is the longest that it takes"
        )


def check_reward_model(config: RewardModelConfig) -> None:
    """Keys fit together; an address becomes a list of addresses."""
    if not (config.is_served and config.has_worker):
        _check_no_writer(config)
    if not config.enable:
        return
    name, url = config.rollout.name, config.rollout.url
    if config.is_served and config.model.input_tokenizer is None:
        raise ConfigError(
            f"reward_model.model.input_tokenizer=null: with reward_model.rollout.name={name!r} the "
            "reward model reads conversations, not the actor's tokens"
        )
    if config.has_worker:
        _check_own(config)
        if url is not None:
            raise ConfigError(
                f"{URL}={shown(url)}: reward_model.rollout.name={shown(name)} is a model of this "
                "run's own; the name of a remote server is vllm or sglang"
            )
        return
    _check_elsewhere(config)


def _check_elsewhere(config: RewardModelConfig) -> None:
    name, url = config.rollout.name, config.rollout.url
    if url is None:
        raise ConfigError(
            f"{URL}=null: reward_model.rollout.name={name!r} needs the address of the server, "
            "which this run does not start; native is a server of the run's own"
        )
    if config.max_length is not None:
        raise ConfigError(
            f"reward_model.max_length={config.max_length}: the server at {URL} reads conversations "
            "whole; takes null"
        )
    if config.enable_resource_pool:
        raise ConfigError(
            f"reward_model.enable_resource_pool=True: the server at {URL} has its own devices"
        )
    config.rollout.url = as_list(URL, url)
    for address in config.rollout.url:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{URL}={address!r}: takes an address such as http://host:8000")


def _check_no_writer(config: RewardModelConfig) -> None:
    for name, (fine, reason) in OF_WRITERS.items():
        value = getattr(config.rollout, name)
        if value not in fine:
            key = f"reward_model.rollout.{name}={shown(value)}"
            raise UnsupportedError(f"{key} is not supported: {reason}")


def _check_own(config: RewardModelConfig) -> None:
    if config.enable_resource_pool and config.nnodes < 1:
        raise ConfigError(
            f"reward_model.nnodes={config.nnodes}: reward_model.enable_resource_pool=True "
            "needs at least 1 node"
        )
    if config.is_served and config.ulysses_sequence_parallel_size > 1:
        raise ConfigError(
            "reward_model.ulysses_sequence_parallel_size="
            f"{config.ulysses_sequence_parallel_size}: with reward_model.rollout.name=native every "
            "rank serves a whole model; takes 1"
        )
