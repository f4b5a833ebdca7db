"""Samplers: the one table of what each is and takes, the keys that all commands have for them, and
the checks of these keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from caldera.config.fields import (
    ConfigGroup,
    default_of,
    mapping,
    nested,
    option,
    precision,
    shown,
)
from caldera.errors import ConfigError, UnsupportedError

# ---- What a sampler declares

KEY = "actor_rollout_ref.rollout"
REPETITION = "repetition_penalty"
PENALTIES = (REPETITION, "presence_penalty", "frequency_penalty")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "top_p": (1,),
    "min_p": (0,),
    **dict.fromkeys(PENALTIES, (0,)),
    REPETITION: (1,),
    "stop": (None, [], ()),
    "logprobs": (0,),
    "prompt_logprobs": (False,),
}
"""Parameters of requests that not every sampler honours -> what asks for nothing. All but the last
two have keys."""
_PLAIN = frozenset({"top_k", "top_p", "min_p", "stop"})
TENSOR_PARALLEL = "tensor_model_parallel_size"
REMOTE_URL, REMOTE_MODEL = "remote.url", "remote.model"
ENGINE_KWARGS, LOGPROBS_MODE = "engine_kwargs", "logprobs_mode"

_PAGED = _PLAIN | {
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "cudagraph_capture_sizes",
    LOGPROBS_MODE,
    "logprobs",
    "prompt_logprobs",
}
_OF_ENGINES = _PAGED | {
    "engine_python",
    ENGINE_KWARGS,
    "data_parallel_size",
    "disable_log_stats",
    "multi_stage_wake_up",
    "checkpoint_engine.update_weights_bucket_megabytes",
}


@dataclass(frozen=True)
class SamplerTraits:
    """What a sampler is, and which keys it takes. The defaults are those of a custom one: it
    samples from the module that it is given, on one rank, and takes the common keys alone."""

    takes: frozenset[str] = frozenset()
    """Of `OPTIONAL`, the keys and parameters of requests that it honours; others are refused."""
    owns_weights: bool = False
    """Whether it samples with weights of its own, so that those of the module are only their shape;
    else with those of the module, which a trainer may share."""
    takes_weights: bool = True
    """Whether it can be given weights, and so be trained; else it needs the model's shape alone."""
    checks_weights: bool = False
    """Whether it compares its log-probs of a probe with the trainer's after each update."""
    ranks: Literal["one", "tensor_parallel", "engine"] = "one"
    """Who shares a replica where tensor_model_parallel_size is above 1: nobody; ranks of a training
    run, each with its part of every layer; or one engine with the devices of ranks of a node."""
    draws_together: bool = False
    """Whether a sample depends on what else is in its batch, not on its own seed alone."""
    log_probs_before_filters: bool = False
    """Whether its processed log-probs are from before top_k, top_p and min_p."""

    def __post_init__(self) -> None:
        if unknown := sorted(self.takes - OPTIONAL):
            known = ", ".join(sorted(OPTIONAL))
            raise ConfigError(f"SamplerTraits.takes: {unknown[0]!r} is not one of {known}")


OPTIONAL = _OF_ENGINES | {*PENALTIES, "kv_cache_blocks", "native.exact", REMOTE_URL, REMOTE_MODEL}
"""Keys of a sampler's group, and parameters of requests, that not every sampler takes."""

DEFAULT_SAMPLER = "native"
SAMPLERS = {
    "native": SamplerTraits(
        takes=_PAGED | {*PENALTIES, "kv_cache_blocks", "native.exact"}, ranks="tensor_parallel"
    ),
    "hf": SamplerTraits(takes=_PLAIN | {LOGPROBS_MODE}, draws_together=True),
    "vllm": SamplerTraits(
        takes=_OF_ENGINES | {*PENALTIES}, owns_weights=True, checks_weights=True, ranks="engine"
    ),
    "sglang": SamplerTraits(
        takes=_OF_ENGINES | {"presence_penalty", "frequency_penalty"},
        owns_weights=True,
        checks_weights=True,
        ranks="engine",
        log_probs_before_filters=True,
    ),
    "remote": SamplerTraits(
        takes=_PLAIN | {*PENALTIES, REMOTE_URL, REMOTE_MODEL},
        owns_weights=True,
        takes_weights=False,
    ),
}
"""The samplers that come with Caldera, by their names in `rollout.name`."""
NOT_SERVED = ("trtllm",)
"""Samplers of verl's that are not here."""


def trained_samplers() -> list[str]:
    """Those that take the weights that training makes."""
    return [name for name, traits in SAMPLERS.items() if traits.takes_weights]


def takers_of(key: str, trains: bool = False) -> str:
    """The built-in samplers that honour a key, in words; with `trains`, those of training."""
    names = trained_samplers() if trains else SAMPLERS
    return one_of(name for name in names if is_taken(SAMPLERS[name], key, trains))


def one_of(names: Iterable[str]) -> str:
    """Names in words: `native, vllm or sglang`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def is_taken(traits: SamplerTraits, key: str, trains: bool) -> bool:
    """Whether a sampler honours an optional key, in training or elsewhere."""
    if key == TENSOR_PARALLEL:
        return traits.ranks == "engine" or (trains and traits.ranks == "tensor_parallel")
    return key in traits.takes


# ---- The keys that commands have in common


@dataclass
class BatchingKeys(ConfigGroup):
    """Precision, memory and batches of a sampler: of training, generation, serving and judges."""

    dtype: str | None = precision(None)
    """Precision of sampling; null: bfloat16 on CUDA, float32 on a CPU."""
    gpu_memory_utilization: float = option(0.5, minimum=0, maximum=1, unit="share of memory")
    """Memory of the GPU that weights and cache may fill while sampling."""
    enable_chunked_prefill: bool = False
    """Run prompts in pieces beside the decoding, which whole ones interrupt on CUDA. Not for hf."""
    enable_prefix_caching: bool = False
    """Keep the cache of ended requests for requests with the same prefix. Not for hf."""
    max_num_batched_tokens: int = option(8192, minimum=1, unit="tokens")
    """Tokens that one forward pass takes: of whole prompts, or of all that it runs if chunked."""
    max_model_len: int | None = option(None, minimum=1, unit="tokens")
    """Most tokens of prompt and response together; null: prompt_length + response_length."""
    max_num_seqs: int = option(256, minimum=1, unit="sequences")
    """Sequences that are decoded at the same time; others wait."""


@dataclass
class RemoteConfig:
    url: str | None = None
    """rollout.name=remote: address of an OpenAI-compatible server that takes and gives token ids,
    such as http://host:8000. It cannot be trained: for generation and serving."""
    model: str | None = None
    """What the server calls the model; null: the only one that it has."""


@dataclass
class SamplerKeys(BatchingKeys):
    """Which sampler, and its engine or server: of training, generation and serving."""

    name: str | None = None
    """Sampler: native, hf, vllm, sglang, remote, or a custom class, as my.module.MySampler or
    path/to/file.py:MySampler; null: native."""
    seed: int = 42
    """Root of every sample's seed."""
    tensor_model_parallel_size: int = option(1, minimum=1, unit="devices")
    """vLLM and SGLang: ranks of a node whose devices one engine uses; in a run of one process,
    devices of those that it sees."""
    engine_python: str | None = None
    """Python that has vLLM or SGLang, which then runs as a subprocess; null: this one."""
    engine_kwargs: dict[str, Any] = mapping()
    """Further arguments of vLLM (EngineArgs) or SGLang (Engine)."""
    remote: RemoteConfig = nested(RemoteConfig)

    @property
    def sampler(self) -> str:
        """The sampler's name."""
        return self.name or DEFAULT_SAMPLER

    @property
    def traits(self) -> SamplerTraits | None:
        """What the sampler declares; None: it is a custom one, whose class is not loaded yet."""
        return SAMPLERS.get(self.sampler)


@dataclass
class PenaltyKeys(ConfigGroup):
    """What changes a token's chances beside temperature, top_k and top_p, under vLLM's names."""

    min_p: float = option(0.0, minimum=0, maximum=1, unit="share of the most likely probability")
    """Only tokens of at least this share of the most likely one's probability may be drawn; 0:
    all."""
    repetition_penalty: float = option(1.0, minimum=0)
    """Logits of tokens in prompt or response are divided by it, or multiplied if negative; 1:
    none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the response; 0: none."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once per occurrence in the response; 0: none."""


@dataclass
class StopKeys(ConfigGroup):
    stop_token_ids: list[int] | None = None
    """Tokens that end a response beside the model's end tokens. They stay in the response, and are
    trained."""
    stop: list[str] | None = None
    """Strings that end a response. The token that completes one is the response's last, so the text
    of the string stays in the response, and is trained."""


# ---- Their checks


def check_taken(
    keys: BatchingKeys, traits: SamplerTraits, name: str, group: str, trains: bool = False
) -> None:
    """Every optional key that is set is one that the sampler takes; `group` is where they are."""
    elsewhere = {*NEUTRAL, REMOTE_URL}
    if trains:
        elsewhere.add(ENGINE_KWARGS)  # which has a group a sampler there
    for key in sorted({*OPTIONAL, TENSOR_PARALLEL} - elsewhere):
        value, usual = _find(keys, key)
        if value != usual and not is_taken(traits, key, trains):
            raise UnsupportedError(
                f"{group}.{key}={shown(value)}: takes "
                f"{group}.name={takers_of(key, trains)}, not {name}"
            )


def _find(group: Any, key: str) -> tuple[Any, Any]:
    """A key's value and its default; nothing and nothing where the group does not have it."""
    *parents, last = key.split(".")
    for part in parents:
        group = getattr(group, part, None)
    fields = {} if group is None else {field.name: field for field in dataclasses.fields(group)}
    return (getattr(group, last), default_of(fields[last])) if last in fields else (None, None)


def check_parameters(
    keys: PenaltyKeys, traits: SamplerTraits | None, sampler: str, group: str, trains: bool = False
) -> None:
    """Penalties are numbers, and the sampler honours what is set, as far as `traits` tells;
    `sampler` is its key with its name."""
    for penalty in PENALTIES:
        value, (usual,) = getattr(keys, penalty), NEUTRAL[penalty]
        if not math.isfinite(value):
            raise ConfigError(f"{group}.{penalty}={value}: takes a finite number; {usual:g}: none")
        if penalty == REPETITION and value <= 0:
            raise ConfigError(f"{group}.{penalty}={value}: must be more than 0; 1: none")
    key, _, name = sampler.partition("=")
    for parameter, neutral in NEUTRAL.items():
        value = getattr(keys, parameter, neutral[0])
        if value not in neutral and traits is not None and parameter not in traits.takes:
            raise UnsupportedError(
                f"{group}.{parameter}={value}: takes {key}={takers_of(parameter, trains)}, "
                f"not {name}"
            )


def check_stops(keys: StopKeys, ignore_eos: bool, group: str) -> None:
    """Stop strings have characters, and stop tokens are tokens that can end a response."""
    if keys.stop is not None and "" in keys.stop:
        raise ConfigError(f"{group}.stop={keys.stop!r}: takes strings that are not empty")
    tokens = keys.stop_token_ids
    if any(token < 0 for token in tokens or ()):
        raise ConfigError(f"{group}.stop_token_ids={tokens}: takes tokens, which are 0 or more")
    if tokens and ignore_eos:
        raise ConfigError(
            f"{group}.stop_token_ids={tokens} with {group}.ignore_eos=True: no token ends a "
            "response then; set one alone"
        )


def check_untrained(keys: SamplerKeys, traits: SamplerTraits | None) -> None:
    """The keys of a sampler outside training. `traits` is what it declares; None: it is a custom
    one that is not loaded yet."""
    key, name = "rollout.name", keys.sampler
    if name in NOT_SERVED:
        raise UnsupportedError(
            f"{key}={name!r} is not part of this release; takes {', '.join(SAMPLERS)}, or "
            "rollout.url=... for a server of that kind"
        )
    if isinstance(keys, PenaltyKeys):
        check_parameters(keys, traits, f"{key}={name}", "rollout")
    if traits is None:
        return
    check_taken(keys, traits, name, "rollout")
    if (REMOTE_URL in traits.takes) != (keys.remote.url is not None):
        raise ConfigError(
            f"rollout.remote.url={shown(keys.remote.url)} with {key}={name}: {key}=remote needs "
            "the address, and nothing else takes it"
        )


def check_sampling_ranks(size: int, ranks: int, group: str = KEY, devices_from: str = "") -> None:
    """The ranks that sample come in whole groups."""
    if ranks % size:
        raise ConfigError(
            f"{group}.{TENSOR_PARALLEL}={size} does not divide the {ranks} ranks{devices_from}"
        )


def check_sampling_devices(keys: SamplerKeys, a_node: int | None, nodes: int, group: str) -> None:
    """The same by trainer.n_gpus_per_node (None: not known yet, taken as 1) and trainer.nnodes; the
    ranks of one engine are on one node."""
    size, ranks = keys.tensor_model_parallel_size, (a_node or 1) * nodes
    is_engine = keys.traits is not None and keys.traits.ranks == "engine"
    if ranks == 1 and is_engine:
        return  # its engine has all devices that the one process sees
    check_sampling_ranks(size, ranks, group, " (trainer.n_gpus_per_node x trainer.nnodes)")
    if is_engine and a_node is not None and a_node % size:
        raise ConfigError(
            f"{group}.{TENSOR_PARALLEL}={size} does not divide trainer.n_gpus_per_node={a_node}: "
            f"the ranks of one {keys.name} engine are on one node; takes a divisor"
        )
