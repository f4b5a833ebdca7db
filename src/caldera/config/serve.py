"""The configuration of serving a model."""

from __future__ import annotations

from dataclasses import dataclass

from caldera.config.fields import nested, option
from caldera.config.rollout import RolloutConfig, sampler_config
from caldera.config.samplers import (
    DEFAULT_SAMPLER,
    LOGPROBS_MODE,
    SamplerKeys,
    SamplerTraits,
    check_untrained,
)
from caldera.errors import ConfigError


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
class ServeRolloutConfig(SamplerKeys):
    gpu_memory_utilization: float = option(0.9, minimum=0, maximum=1, unit="share of memory")
    """Memory of the GPU that weights and cache may fill."""
    max_model_len: int | None = option(None, minimum=2, unit="tokens")
    """Most tokens of prompt and completion together; null: the model's limit."""
    logprobs_mode: str | None = option(None, choices=("processed_logprobs", "raw_logprobs"))
    """Log-probs of samples after temperature and filters, or before; null: before, as other servers
    tell them, and as the server of rollout.name=remote does there."""


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
    check_untrained(config.rollout, config.rollout.traits)


def served_sampler(config: ServeConfig, length: int, traits: SamplerTraits) -> RolloutConfig:
    """What its sampler takes; `length` is most tokens of prompt and answer."""
    keys = config.rollout
    mode = keys.logprobs_mode or "raw_logprobs"
    others = {LOGPROBS_MODE: mode} if LOGPROBS_MODE in traits.takes else {}
    return sampler_config(
        keys, prompt_length=length - 1, response_length=length - 1, max_model_len=length, **others
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
    if rollout.name is None:
        rollout.name = DEFAULT_SAMPLER
        chosen.append(f"rollout.name={rollout.name}")
    if rollout.dtype is None:
        rollout.dtype = "bfloat16" if server.device == "cuda" else "float32"
        chosen.append(f"rollout.dtype={rollout.dtype}")
    return chosen
