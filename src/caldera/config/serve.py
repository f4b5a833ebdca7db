"""The configuration of serving a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import mapping, nested, option, precision, shown
from caldera.config.rollout import RemoteConfig, RolloutConfig
from caldera.config.rollout_checks import ENGINE_SAMPLERS, REMOTE, check_engine_keys
from caldera.errors import ConfigError, UnsupportedError


@dataclass
class ServeModelConfig:
    path: str | None = None
    """Folder or hub name of the Hugging Face model. Required."""
    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; null: model.path."""
    custom_chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    external_lib: str | None = None
    """Modules, separated by commas, that are imported before the model is built."""


@dataclass
class ServeRolloutConfig:
    name: str = "native"
    """Sampler: native, hf, vllm, sglang, remote."""
    max_model_len: int | None = option(None, minimum=2, unit="tokens")
    """Most tokens of prompt and answer together; null: as many as the model was made for."""
    dtype: str | None = precision(None)
    """Precision of sampling; null: bfloat16 on CUDA, float32 on a CPU."""
    gpu_memory_utilization: float = option(0.9, minimum=0, maximum=1, unit="share of memory")
    """Memory of the GPU that weights and cache may fill."""
    tensor_model_parallel_size: int = option(1, minimum=1, unit="devices")
    """vLLM and SGLang: devices that share the engine."""
    engine_python: str | None = None
    """Python that has vLLM or SGLang, which then runs in a process of its own; null: this one."""
    engine_kwargs: dict[str, Any] = mapping()
    """Further arguments of vLLM (EngineArgs) or SGLang (Engine)."""
    remote: RemoteConfig = nested(RemoteConfig)
    max_num_batched_tokens: int = option(8192, minimum=1, unit="tokens")
    """Tokens that one forward pass takes: of whole prompts, or of all that it runs if chunked."""
    max_num_seqs: int = option(256, minimum=1, unit="sequences")
    """Sequences that are decoded at the same time; others wait."""
    enable_chunked_prefill: bool = False
    """Run prompts in pieces beside the decoding, which whole ones interrupt. Not for hf."""
    enable_prefix_caching: bool = False
    """Keep the cache of ended requests for those that begin alike. Not for hf."""
    logprobs_mode: str | None = option(None, choices=("processed_logprobs", "raw_logprobs"))
    """Log-probs of samples after temperature and filters, or before; null: before, as other servers
    tell them, and as the server of rollout.name=remote does there."""
    seed: int = 42
    """Root of the seeds of requests that bring none."""


@dataclass
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: every one of this machine."""
    port: int = option(8000, minimum=0, maximum=65535)
    """Port to listen on; 0: a free one."""
    served_model_name: str | None = None
    """What requests call the model; null: model.path."""
    tool_format: str = "hermes"
    """How the model writes calls of tools: hermes, openai, qwen3_coder, gpt-oss, react."""
    max_sessions: int = option(10_000, minimum=1, unit="sessions")
    """Sessions whose requests are kept; those not used for longest go first."""
    shutdown_seconds: float = option(30.0, minimum=0, unit="seconds")
    """Time that requests in flight get to finish when the server is ended."""
    device: str | None = option(None, choices=("cuda", "cpu"))
    """Where the model lives; null: cuda where there is a GPU, else cpu."""


@dataclass
class ServeConfig:
    model: ServeModelConfig = nested(ServeModelConfig)
    rollout: ServeRolloutConfig = nested(ServeRolloutConfig)
    server: ServerConfig = nested(ServerConfig)


def check_serve(config: ServeConfig) -> None:
    """Keys fit together."""
    if not config.model.path:
        raise ConfigError("model.path is required: give model.path=...")
    rollout = config.rollout
    if rollout.engine_kwargs and rollout.name not in ENGINE_SAMPLERS:
        raise UnsupportedError(
            f"rollout.engine_kwargs={shown(rollout.engine_kwargs)}: takes rollout.name=vllm or "
            f"sglang, not {rollout.name}"
        )
    check_engine_keys(sampler_config(config, 2), "rollout")
    if (rollout.name == REMOTE) != (rollout.remote.url is not None):
        raise ConfigError(
            f"rollout.remote.url={shown(rollout.remote.url)} with rollout.name={rollout.name}: "
            "rollout.name=remote needs the address, and nothing else takes it"
        )
    if rollout.name == REMOTE and rollout.logprobs_mode is not None:
        raise UnsupportedError(
            f"rollout.logprobs_mode={shown(rollout.logprobs_mode)}: rollout.name=remote leaves it "
            "to the server"
        )
    if rollout.name != REMOTE and rollout.remote.model is not None:
        raise ConfigError(
            f"rollout.remote.model={shown(rollout.remote.model)}: takes rollout.name=remote, not "
            f"{rollout.name}"
        )


def sampler_config(config: ServeConfig, length: int) -> RolloutConfig:
    """What the samplers of training take; `length` is most tokens of prompt and answer."""
    keys = config.rollout
    # To another server nothing is said of it: RolloutConfig's own default stands for that.
    of_server = RolloutConfig.logprobs_mode if keys.name == REMOTE else "raw_logprobs"
    return RolloutConfig(
        name=keys.name,
        prompt_length=length - 1,
        response_length=length - 1,
        max_model_len=length,
        dtype=keys.dtype,
        gpu_memory_utilization=keys.gpu_memory_utilization,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        max_num_seqs=keys.max_num_seqs,
        enable_chunked_prefill=keys.enable_chunked_prefill,
        enable_prefix_caching=keys.enable_prefix_caching,
        logprobs_mode=keys.logprobs_mode or of_server,
        seed=keys.seed,
        tensor_model_parallel_size=keys.tensor_model_parallel_size,
        engine_python=keys.engine_python,
        engine_kwargs={keys.name: keys.engine_kwargs},
        remote=keys.remote,
    )


def resolve_serve(config: ServeConfig, gpus: int) -> list[str]:
    """Fill in what depends on the machine; returns what was chosen, for a person to read."""
    server, rollout = config.server, config.rollout
    chosen = []
    if server.device is None:
        server.device = "cuda" if gpus else "cpu"
        chosen.append(f"server.device={server.device}")
    elif server.device == "cuda" and not gpus:
        raise ConfigError("server.device='cuda': this machine has no usable GPU; takes cpu")
    if rollout.dtype is None:
        rollout.dtype = "bfloat16" if server.device == "cuda" else "float32"
        chosen.append(f"rollout.dtype={rollout.dtype}")
    return chosen
