"""The configurations of generating responses to a file, and of scoring such a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from caldera.config.fields import nested, option
from caldera.config.machine import check_gpus_here, choose_devices, warn_of_cores
from caldera.config.ppo import RayConfig
from caldera.config.reward import CustomRewardFunctionConfig
from caldera.config.rollout import RolloutConfig, sampler_config
from caldera.config.samplers import (
    DEFAULT_SAMPLER,
    REPETITION,
    PenaltyKeys,
    SamplerKeys,
    StopKeys,
    check_sampling_devices,
    check_stops,
    check_untrained,
)
from caldera.errors import ConfigError
from caldera.storage import is_url

GROUP = "rollout"


@dataclass
class GenerationDataConfig:
    path: str | None = None
    """File with the prompts: parquet, JSON or JSON lines. Required."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    n_samples: int = option(5, minimum=1, unit="samples a prompt")
    """Answers per prompt."""
    output_path: str | None = None
    """Parquet file that is written: the input and the column `responses`. Required."""
    batch_size: int = option(128, minimum=1, unit="prompts")
    """Prompts that are sampled at a time. What is written so far is whole batches."""


@dataclass
class GenerationModelConfig:
    path: str | None = None
    """Folder or hub name of the Hugging Face model; with rollout.url, what the server calls it.
    Required."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    external_lib: str | None = None
    """Modules, separated by commas, that are imported before the model is built."""


@dataclass
class GenerationRolloutConfig(StopKeys, PenaltyKeys, SamplerKeys):
    url: str | None = None
    """Address of a server that samples, such as http://host:8000, asked at /v1/chat/completions;
    null: samplers of the run's own."""
    temperature: float = option(1.0, minimum=0)
    """Divisor of the logits; 0: greedy, with n_samples=1."""
    top_k: int = option(50, minimum=-1, unit="tokens")
    """Most likely tokens that may be drawn; -1: all."""
    top_p: float = option(0.7, minimum=0, maximum=1, unit="probability")
    """Probability mass that may be drawn."""
    prompt_length: int = option(1536, minimum=1, unit="tokens")
    """Most tokens of a prompt."""
    response_length: int = option(512, minimum=1, unit="tokens")
    """Most tokens of a response."""
    ignore_eos: bool = False
    """Go on to the full length whatever is sampled."""


@dataclass
class GenerationRunConfig:
    nnodes: int = option(1, minimum=1, unit="nodes")
    """Machines that sample."""
    n_gpus_per_node: int | None = option(None, minimum=1, unit="devices")
    """Devices (GPUs, or processes on a CPU) a node; null: chosen from the machine."""
    worker_group: str | None = option(None, choices=("local", "ray"))
    """Where samplers live: processes of this machine, or Ray's. null: Ray for several nodes, or
    where RAY_ADDRESS names a cluster; else local."""
    ray_wait_register_center_timeout: int = option(300, minimum=1, unit="seconds")
    """How long to wait for places that other runs hold on a Ray cluster, and for ranks to start."""
    device: str | None = option(None, choices=("cuda", "cpu"))
    """Where the model lives; null: cuda where there is a GPU, else cpu."""


@dataclass
class GenerationConfig:
    data: GenerationDataConfig = nested(GenerationDataConfig)
    model: GenerationModelConfig = nested(GenerationModelConfig)
    rollout: GenerationRolloutConfig = nested(GenerationRolloutConfig)
    trainer: GenerationRunConfig = nested(GenerationRunConfig)
    ray_kwargs: RayConfig = nested(RayConfig)


def generation_sampler(config: GenerationConfig) -> RolloutConfig:
    """What its samplers take."""
    keys = config.rollout
    return sampler_config(
        keys,
        n=config.data.n_samples,
        temperature=keys.temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        prompt_length=keys.prompt_length,
        response_length=keys.response_length,
        ignore_eos=keys.ignore_eos,
        calculate_log_probs=False,
    )


# ---- Checks of generation, and defaults of the machine


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
            f"data.n_samples={config.data.n_samples}: with rollout.temperature=0 all responses to "
            "a prompt are the same; takes data.n_samples=1, or a rollout.temperature above 0"
        )
    check_untrained(rollout, rollout.traits)
    check_sampling_devices(rollout, config.trainer.n_gpus_per_node, config.trainer.nnodes, GROUP)
    check_stops(rollout, rollout.ignore_eos, GROUP)
    if rollout.url is not None:
        _check_server(config, rollout.url)


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
        ("nnodes", config.trainer.nnodes, 1),
        ("worker_group", config.trainer.worker_group, None),
    ):
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
    for name in ("min_p", REPETITION):
        value, usual = getattr(rollout, name), getattr(PenaltyKeys, name)
        if value != usual:
            raise ConfigError(
                f"rollout.{name}={value}: chat completions (rollout.url) do not have it; takes "
                f"rollout.{name}={usual:g}, or rollout.remote.url instead of rollout.url"
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
        rollout.name = DEFAULT_SAMPLER
        chosen.append(f"rollout.name={rollout.name}")
    if rollout.dtype is None:
        rollout.dtype = "bfloat16" if trainer.device == "cuda" else "float32"
        chosen.append(f"rollout.dtype={rollout.dtype}")
    check_sampling_devices(rollout, trainer.n_gpus_per_node, trainer.nnodes, GROUP)
    return chosen


@dataclass
class EvaluationDataConfig:
    path: str | None = None
    """Parquet file with responses. Required."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    response_key: str = "responses"
    """Column with the responses."""
    data_source_key: str = "data_source"
    """Column that picks the scorer."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""
    compare_path: str | None = None
    """A second file with responses to the same prompts, to compare the first with; null: none."""


@dataclass
class EvaluationRunConfig:
    num_workers: int | None = option(None, minimum=1, unit="processes")
    """Processes that score; null: one a core."""
    timeout: float | None = option(300.0, minimum=0.001, unit="seconds")
    """Time limit of scoring one response; then it has failed. null: no limit."""
    pass_score: float = 1.0
    """A response passes with this score or more, by `acc` where the scorer returns it."""
    output_dir: str | None = None
    """Folder for NAME.evaluation.json and NAME.evaluation.html; null: that of data.path."""
    shown_answers: int = option(200, minimum=0, unit="responses")
    """Failing responses on the page."""


@dataclass
class EvaluationConfig:
    data: EvaluationDataConfig = nested(EvaluationDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = nested(CustomRewardFunctionConfig)
    evaluation: EvaluationRunConfig = nested(EvaluationRunConfig)
