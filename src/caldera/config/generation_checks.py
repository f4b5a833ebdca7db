"""Generation: checks that need more than one key, and defaults of the machine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from caldera.config.fields import shown
from caldera.config.machine import check_gpus_here, choose_devices, warn_of_cores
from caldera.config.offline import GenerationConfig, GenerationRolloutConfig
from caldera.config.rollout import PenaltyKeys
from caldera.config.rollout_checks import (
    ENGINE_SAMPLERS,
    OTHER_SAMPLERS,
    REMOTE,
    REPETITION,
    check_penalties,
    check_sampling_devices,
    check_stops,
)
from caldera.errors import ConfigError, UnsupportedError
from caldera.storage import is_url


def check_generation(config: GenerationConfig) -> None:
    """Keys fit together."""
    for key, value in {
        "data.path": config.data.path,
        "data.output_path": config.data.output_path,
        "model.path": config.model.path,
    }.items():
        if not value:
            raise ConfigError(f"{key} is required: give {key}=...")
    _check_output(config)
    rollout = config.rollout
    if rollout.temperature == 0 and config.data.n_samples != 1:
        raise ConfigError(
            f"data.n_samples={config.data.n_samples}: with rollout.temperature=0 all answers to a "
            "prompt are the same; takes data.n_samples=1, or a rollout.temperature above 0"
        )
    if rollout.name in OTHER_SAMPLERS:
        raise UnsupportedError(
            f"rollout.name={rollout.name!r} is not part of this release; takes native, hf, vllm, "
            "sglang, remote, or rollout.url=... for a server of that kind"
        )
    _check_engine(rollout)
    _check_devices(config)
    check_stops(rollout, rollout.ignore_eos, "rollout")
    check_penalties(rollout, rollout.name or "native", "rollout", "rollout")
    if rollout.url is not None:
        _check_server(config, rollout.url)


def _check_engine(rollout: GenerationRolloutConfig) -> None:
    name = rollout.name or "native"
    for key, value, default in (
        ("engine_python", rollout.engine_python, None),
        ("engine_kwargs", rollout.engine_kwargs, {}),
        ("tensor_model_parallel_size", rollout.tensor_model_parallel_size, 1),
    ):
        if value != default and name not in ENGINE_SAMPLERS:
            raise UnsupportedError(
                f"rollout.{key}={shown(value)}: takes rollout.name=vllm or sglang, not {name}"
            )
    if (name == REMOTE) != (rollout.remote.url is not None):
        raise ConfigError(
            f"rollout.remote.url={shown(rollout.remote.url)} with rollout.name={name}: "
            "rollout.name=remote needs the address, and nothing else takes it"
        )


def _check_devices(config: GenerationConfig) -> None:
    """The ranks that share an engine come in whole groups, each on one node."""
    rollout, trainer = config.rollout, config.trainer
    size, a_node = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node
    check_sampling_devices(rollout.name, size, a_node, trainer.nnodes)


def _check_output(config: GenerationConfig) -> None:
    output = str(config.data.output_path)
    if is_url(output) or not output.endswith(".parquet"):
        raise ConfigError(
            f"data.output_path={output!r}: takes a file of this machine whose name ends in .parquet"
        )
    if Path(output).expanduser().resolve() == Path(str(config.data.path)).expanduser().resolve():
        raise ConfigError(f"data.output_path={output!r} is data.path: takes another file")


def _check_server(config: GenerationConfig, url: str) -> None:
    rollout = config.rollout
    parts = urlsplit(url)
    for key, value, default in (
        ("nnodes", config.trainer.nnodes, 1), ("worker_group", config.trainer.worker_group, None),
    ):  # fmt: skip
        if value != default:
            raise ConfigError(
                f"trainer.{key}={value}: the server at rollout.url samples; set one alone"
            )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"rollout.url={url!r}: takes an address such as http://host:8000")
    if rollout.name is not None:
        raise ConfigError(
            f"rollout.name={rollout.name!r}: the server at rollout.url samples; set one alone"
        )
    if rollout.top_k != -1:
        raise ConfigError(
            f"rollout.top_k={rollout.top_k}: chat completions (rollout.url) have no such limit; "
            "takes rollout.top_k=-1"
        )
    for option in ("min_p", REPETITION):
        value, usual = getattr(rollout, option), getattr(PenaltyKeys, option)
        if value != usual:
            raise ConfigError(
                f"rollout.{option}={value}: chat completions (rollout.url) do not have it; takes "
                f"rollout.{option}={usual:g}, or rollout.remote.url instead of rollout.url"
            )
    if rollout.stop_token_ids:
        raise ConfigError(
            f"rollout.stop_token_ids={rollout.stop_token_ids}: chat completions (rollout.url) have "
            "stop strings only; takes rollout.stop, or rollout.remote.url instead of rollout.url"
        )
    if rollout.ignore_eos:
        raise ConfigError(
            "rollout.ignore_eos=True: chat completions (rollout.url) have no such switch; takes "
            "False"
        )


def resolve_generation(config: GenerationConfig, gpus: int) -> list[str]:
    """Fill in what depends on the machine; returns what was chosen, for a person to read.

    `gpus` are those of this machine, or of a node of the cluster.
    """
    trainer, rollout = config.trainer, config.rollout
    chosen: list[str] = []
    if trainer.worker_group == "local" and trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.worker_group='local': trainer.nnodes={trainer.nnodes} nodes need 'ray'"
        )
    device, ranks = choose_devices(config, gpus, chosen)
    check_gpus_here(config, gpus)
    if trainer.worker_group == "local":
        warn_of_cores(device, ranks)
    if rollout.name is None:
        rollout.name = "native"
        chosen.append("rollout.name=native")
    if rollout.dtype is None:
        rollout.dtype = "bfloat16" if trainer.device == "cuda" else "float32"
        chosen.append(f"rollout.dtype={rollout.dtype}")
    _check_devices(config)
    return chosen
