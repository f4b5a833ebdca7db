"""Checks of the reward model's keys that need more than one of them."""

from __future__ import annotations

import urllib.parse

from caldera.config.fields import as_list, shown
from caldera.config.reward import RewardModelConfig
from caldera.errors import ConfigError

URL = "reward_model.rollout.url"


def check_reward_model(config: RewardModelConfig) -> None:
    """Keys fit together; an address becomes a list of addresses."""
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
                "run's own; the name of a server elsewhere is vllm or sglang"
            )
        return
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
