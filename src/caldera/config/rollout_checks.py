"""Keys of sampling that not every sampler takes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from caldera.config.fields import default_of, shown
from caldera.config.rollout import PenaltyKeys, RolloutConfig, StopKeys, ValKwargs
from caldera.errors import ConfigError, UnsupportedError

KEY = "actor_rollout_ref.rollout"
ENGINE_SAMPLERS = ("vllm", "sglang")
"""They sample with an engine that has a model of its own."""
REMOTE = "remote"
SGLANG = "sglang"
REPETITION = "repetition_penalty"
PENALTIES = (REPETITION, "presence_penalty", "frequency_penalty")
TAKERS_OF_REPETITION = ("native", "vllm")
TAKERS_OF_PENALTIES = ("native", *ENGINE_SAMPLERS)
OTHER_SAMPLERS = ("trtllm",)
"""Names of verl's that nothing here serves."""

TENSOR_PARALLEL = "tensor_model_parallel_size"
OF_ENGINES = (
    "engine_python", TENSOR_PARALLEL, "data_parallel_size", "disable_log_stats",
    "multi_stage_wake_up",
)  # fmt: skip
RECORDED = "cudagraph_capture_sizes"
"""The native sampler takes it as well."""
TRACE_BACKENDS = ("mlflow", "trackio")
NOT_OF_ENGINES = ("kv_cache_blocks", "native.exact")
BUCKETS = "checkpoint_engine.update_weights_bucket_megabytes"


def check_rollout(config: RolloutConfig) -> None:
    """Every key that is set is one that the sampler takes, or the first that is not raises."""
    name = config.name
    if name in OTHER_SAMPLERS:
        raise UnsupportedError(
            f"{KEY}.name={name!r} is not part of this release; takes native, hf, vllm, sglang"
        )
    if name == REMOTE:
        raise UnsupportedError(
            f"{KEY}.name={name!r}: a server elsewhere does not take the weights that training "
            "makes; takes native, hf, vllm, sglang"
        )
    for option, value in {"url": config.remote.url, "model": config.remote.model}.items():
        if value is not None:
            raise UnsupportedError(
                f"{KEY}.remote.{option}={value!r}: a server elsewhere cannot be trained"
            )
    if config.trace.backend not in (None, *TRACE_BACKENDS):
        raise UnsupportedError(
            f"{KEY}.trace.backend={config.trace.backend!r} is not part of this release; takes "
            f"{', '.join(TRACE_BACKENDS)}"
        )
    ranks = config.tensor_model_parallel_size
    if ranks > 1 and config.native.exact and name not in ENGINE_SAMPLERS:
        raise UnsupportedError(
            f"{KEY}.native.exact=True with {KEY}.{TENSOR_PARALLEL}={ranks}: sums over ranks have "
            f"another order than the trainer's; takes {KEY}.{TENSOR_PARALLEL}=1"
        )
    check_engine_keys(config, KEY, has_ranks=True)
    check_stops(config, config.ignore_eos, KEY)
    groups: dict[str, RolloutConfig | ValKwargs] = {
        KEY: config,
        f"{KEY}.val_kwargs": config.val_kwargs,
    }
    for group, keys in groups.items():
        check_penalties(keys, name or "native", group, KEY)
        if name == SGLANG and keys.do_sample and _reports_processed(config):
            _check_filters(keys, group)


def _reports_processed(config: RolloutConfig) -> bool:
    return config.calculate_log_probs and config.logprobs_mode == "processed_logprobs"


def _check_filters(keys: RolloutConfig | ValKwargs, group: str) -> None:
    for option in ("top_k", "top_p", "min_p"):
        value = getattr(keys, option)
        if value != _default(option) and (option, value) != ("top_k", 0):
            raise UnsupportedError(
                f"{group}.{option}={value}: {KEY}.name=sglang reports log-probs from before this "
                f"filter. Takes {KEY}.logprobs_mode=raw_logprobs, {KEY}.calculate_log_probs=False, "
                f"or {KEY}.name=native, vllm or hf"
            )


def check_penalties(keys: PenaltyKeys, sampler: str, group: str, key: str) -> None:
    """Penalties are numbers that the sampler takes; `group` has them, `key` the sampler's name. A
    server elsewhere refuses by itself what it cannot honour."""
    for option in PENALTIES:
        value, usual = getattr(keys, option), getattr(PenaltyKeys, option)
        if not math.isfinite(value):
            raise ConfigError(f"{group}.{option}={value}: takes a finite number; {usual:g}: none")
        if option == REPETITION and value <= 0:
            raise ConfigError(f"{group}.{option}={value}: must be more than 0; 1: none")
        takers = TAKERS_OF_REPETITION if option == REPETITION else TAKERS_OF_PENALTIES
        if value != usual and sampler not in (*takers, REMOTE):
            raise UnsupportedError(
                f"{group}.{option}={value}: takes {key}.name={' or '.join(takers)}, not {sampler}"
            )


def check_stops(keys: StopKeys, ignore_eos: bool, group: str) -> None:
    """Stop strings have characters, and stop tokens are tokens that can end an answer."""
    if keys.stop is not None and "" in keys.stop:
        raise ConfigError(f"{group}.stop={keys.stop!r}: takes strings that are not empty")
    tokens = keys.stop_token_ids
    if any(token < 0 for token in tokens or ()):
        raise ConfigError(f"{group}.stop_token_ids={tokens}: takes tokens, which are 0 or more")
    if tokens and ignore_eos:
        raise ConfigError(
            f"{group}.stop_token_ids={tokens} with {group}.ignore_eos=True: no token ends an "
            "answer then; set one alone"
        )


def check_sampling_ranks(size: int, ranks: int, devices_from: str = "") -> None:
    """The ranks that sample come in whole groups."""
    if ranks % size:
        raise ConfigError(
            f"{KEY}.{TENSOR_PARALLEL}={size} does not divide the {ranks} ranks{devices_from}"
        )


def check_sampling_devices(name: str | None, size: int, a_node: int | None, nodes: int) -> None:
    """The same by trainer.n_gpus_per_node (None: not known yet, taken as 1) and trainer.nnodes; the
    ranks of one engine are on one node."""
    ranks, is_engine = (a_node or 1) * nodes, name in ENGINE_SAMPLERS
    if ranks == 1 and is_engine:
        return  # its engine has all devices that the one process sees
    check_sampling_ranks(size, ranks, " (trainer.n_gpus_per_node x trainer.nnodes)")
    if is_engine and a_node is not None and a_node % size:
        raise ConfigError(
            f"{KEY}.{TENSOR_PARALLEL}={size} does not divide trainer.n_gpus_per_node={a_node}: "
            f"the ranks of one {name} engine are on one node; takes a divisor"
        )


def check_engine_keys(config: RolloutConfig, key: str, has_ranks: bool = False) -> None:
    """The keys of engines; `key` is the group that they are in. `has_ranks`: several processes may
    share the native sampler."""
    name = config.name or "native"
    is_engine = name in ENGINE_SAMPLERS
    of_others = (*OF_ENGINES, BUCKETS) if name == "native" else (*OF_ENGINES, BUCKETS, RECORDED)
    for option in NOT_OF_ENGINES if is_engine else of_others:
        is_shared = has_ranks and option == TENSOR_PARALLEL
        if is_shared and name == "native":
            continue
        value, default = _value(config, option), _default(option)
        if value != default:
            others = "native, vllm or sglang" if is_shared else "vllm or sglang"
            takers = "native" if is_engine else others
            raise UnsupportedError(
                f"{key}.{option}={shown(value)}: takes {key}.name={takers}, not {name}"
            )
    for sampler, given in _without_nulls(config.engine_kwargs).items():
        if sampler not in ENGINE_SAMPLERS:
            raise UnsupportedError(
                f"{key}.engine_kwargs.{sampler}={given!r}: takes {' or '.join(ENGINE_SAMPLERS)}, "
                f"not {sampler}"
            )
        if sampler != name:
            raise UnsupportedError(
                f"{key}.engine_kwargs.{sampler}={given!r}: takes {key}.name={sampler}, not {name}"
            )
        if not isinstance(given, dict):
            raise ConfigError(f"{key}.engine_kwargs.{sampler}={given!r}: takes a group of keys")


def _without_nulls(extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are given: null stands for one that is not."""
    items = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in extra.items()}
    return {key: value for key, value in items.items() if value is not None and value != {}}


def _value(config: Any, option: str) -> Any:
    for part in option.split("."):
        config = getattr(config, part)
    return config


def _default(option: str) -> Any:
    kind: Any = RolloutConfig
    *groups, last = option.split(".")
    for part in groups:
        kind = default_of(_field(kind, part))
    return default_of(_field(kind, last))


def _field(kind: Any, name: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(kind) if field.name == name)
