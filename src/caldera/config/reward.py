"""The keys of scoring."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import II

from caldera.config.actor import STRATEGIES
from caldera.config.fields import (
    ConfigGroup,
    as_list,
    default_of,
    listed,
    mapping,
    nested,
    option,
    precision,
    refused,
    shown,
    walk,
)
from caldera.config.megatron import RewardMegatronConfig
from caldera.config.profiling import ProfilerConfig
from caldera.config.reasons import (
    ALWAYS_PACKED,
    NO_IMAGES,
    NO_SHARED_MEMORY,
    ONE_REWARD_MANAGER,
    ONE_TIMEOUT,
    SCORED_WHILE_SAMPLING,
    WEIGHTS_ARE_READ,
)
from caldera.config.samplers import BatchingKeys
from caldera.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from caldera.config.ppo import PPOTrainerConfig

NO_LANGUAGE_HEAD = "a reward model has no language head; leave the key out"
NO_SERVER_OPTION = "the server of reward models has no such option"
WHOLE_ON_EACH_RANK = "every rank serves a whole model"


@dataclass
class RewardFSDPConfig:
    @dataclass
    class WrapPolicy:
        min_num_params: int = option(0, minimum=0, unit="parameters")
        """Parts with at least so many parameters are gathered whole; 0: decoder layers."""

    wrap_policy: WrapPolicy = nested(WrapPolicy)
    param_offload: bool = False
    """Keep parameters in host memory between phases (on a GPU)."""
    reshard_after_forward: bool = True
    """Drop gathered parameters after the forward pass."""
    fsdp_size: int = option(-1, minimum=-1, unit="ranks")
    """Ranks that a copy of the model is sharded over; -1: all of them."""
    forward_prefetch: bool = False
    """Gather the next layer's parameters while a layer computes."""


@dataclass
class RewardModelModelConfig:
    input_tokenizer: str | None = II("actor_rollout_ref.model.path")
    """Tokenizer of the responses. Where the one in `path` differs, the reward model reads the
    conversation rendered again by its own chat template; null: it reads the actor's tokens."""
    path: str | None = "~/models/FsfairX-LLaMA3-RM-v0.1"
    """Folder or hub name of the reward model: a sequence classifier of one label, or, with
    `rollout.name=native`, a language model (of an architecture that ends in ForCausalLM)."""
    external_lib: str | None = II("actor_rollout_ref.model.external_lib")
    """Modules that are imported before the model is built."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    override_config: dict[str, Any] = mapping()
    """Values that replace those of the model's config.json."""
    use_shm: bool = refused(False, NO_SHARED_MEMORY)
    use_remove_padding: bool = refused(False, ALWAYS_PACKED, met=(True,))
    use_fused_kernels: bool = refused(
        II("actor_rollout_ref.model.use_fused_kernels"), NO_LANGUAGE_HEAD
    )
    fsdp_config: RewardFSDPConfig = nested(RewardFSDPConfig)
    """Memory of the reward model."""


@dataclass
class RewardRolloutConfig(BatchingKeys):
    """The server of a reward model. A language model samples with the native sampler, whose keys
    of precision, memory and batches these are."""

    name: str | None = option(None, choices=("native", "vllm", "sglang"))
    """Score through a server: `native` is one of this run's own, a whole model on each rank;
    `vllm` (POST /classify) and `sglang` (POST /v1/embeddings) are found at `url`; null: none."""
    url: Any = None
    """Address of the server, or a list of several, over which requests are balanced."""
    dtype: str | None = precision(None)
    """Precision of a language model; null: bfloat16 on a GPU, float32 on a CPU. A classifier has
    that precision always."""
    gpu_memory_utilization: float = option(0.5, minimum=0, maximum=1, unit="share of memory")
    """Memory of the GPU that a language model's weights and cache may fill while it is awake."""
    enforce_eager: bool = refused(True, NO_SERVER_OPTION)
    cudagraph_capture_sizes: list[int] | None = refused(None, NO_SERVER_OPTION)
    free_cache_engine: bool = True
    """Keep the model in host memory, without a cache, while it has nothing to score (on a GPU that
    it shares)."""
    data_parallel_size: int = refused(1, WHOLE_ON_EACH_RANK)
    expert_parallel_size: int = refused(1, WHOLE_ON_EACH_RANK)
    tensor_model_parallel_size: int = refused(2, WHOLE_ON_EACH_RANK, met=(1,))
    max_num_batched_tokens: int = option(8192, minimum=1, unit="tokens")
    """Tokens of the sequences that are scored together, a longer one by itself; of a language
    model, tokens of a forward pass."""
    max_model_len: int | None = option(None, minimum=1, unit="tokens")
    """Longest sequence that is scored; null: as long as the model takes. Of a language model,
    prompt and response together; null: prompt_length + response_length, or the model's limit."""
    max_num_seqs: int = option(1024, minimum=1, unit="sequences")
    """Sequences that are scored, or written, together at most."""
    load_format: str = refused("auto", NO_SERVER_OPTION)
    engine_kwargs: dict[str, Any] = refused({}, NO_SERVER_OPTION)
    limit_images: int | None = refused(None, NO_IMAGES)
    disable_log_stats: bool = refused(True, NO_SERVER_OPTION)
    skip_tokenizer_init: bool = refused(False, NO_SERVER_OPTION)
    prompt_length: int = option(2048, minimum=1, unit="tokens")
    """Language models: longest prompt of a request."""
    response_length: int = option(2048, minimum=1, unit="tokens")
    """Language models: longest response to a request, and the default of `max_tokens`."""


@dataclass
class SandboxFusionConfig(ConfigGroup):
    """Where programs that a model wrote are tested."""

    url: str | None = None
    """Address of `caldera sandbox serve` or of a Sandbox Fusion server; null: this machine's own
    sandbox. Sandbox Fusion only runs programs: asserts run there in the process of the program that
    they test, and an answer can forge a pass (by rebinding `exec`, by an object that equals
    everything). Problems with stdin or fn_name are judged outside everywhere."""
    max_concurrent: int = option(64, minimum=1, unit="programs")
    """Programs at a time, of each process that scores; in the machine's own sandbox at most as
    many as it has cores."""
    memory_limit_mb: int = option(1024, minimum=1, unit="MB")
    """Memory of a program."""


@dataclass
class RewardModelConfig(ConfigGroup):
    enable: bool = False
    """Score responses with a model."""
    enable_resource_pool: bool = False
    """Give the reward model separate devices; else it shares those of the other models."""
    n_gpus_per_node: int = option(8, minimum=1, unit="devices")
    """Devices per node of its pool, where it has one."""
    nnodes: int = option(0, minimum=0, unit="nodes")
    """Nodes of its pool, where it has one."""
    strategy: str = option("fsdp", choices=STRATEGIES)
    """Engine of the reward model."""
    worker_class: str | None = None
    """The worker of this role: a name that is registered, or a class derived from
    RewardModelWorker, as my.module.MyWorker or path/to/file.py:MyWorker; null: that one."""
    model: RewardModelModelConfig = nested(RewardModelModelConfig)
    micro_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Deprecated: samples per pass over all devices; replaced by micro_batch_size_per_gpu."""
    micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward pass on one device."""
    max_length: int | None = option(None, minimum=1, unit="tokens")
    """Tokens of a conversation that the reward model reads, from its beginning; null: all."""
    use_dynamic_bsz: bool | None = II("critic.use_dynamic_bsz")
    """Form micro-batches by tokens instead of by samples; null: where no size in samples is
    given."""
    forward_max_token_len_per_gpu: int | None = option(
        II("critic.forward_max_token_len_per_gpu"), minimum=1, unit="tokens"
    )
    """Tokens per micro-batch then."""
    ulysses_sequence_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the tokens of each micro-batch."""
    nccl_timeout: int = refused(600, ONE_TIMEOUT)
    load_weight: bool = refused(True, WEIGHTS_ARE_READ)
    reward_manager: str = "naive"
    """Name of the reward manager."""
    reward_kwargs: dict[str, Any] = mapping()
    """Further arguments of the reward manager."""
    reward_loop_source: str = refused("register", ONE_REWARD_MANAGER)
    reward_loop_module_path: str | None = refused(None, ONE_REWARD_MANAGER)
    reward_loop_class_name: str | None = refused(None, ONE_REWARD_MANAGER)
    launch_reward_fn_async: bool = refused(False, SCORED_WHILE_SAMPLING, met=(True,))
    use_reward_loop: bool = refused(True, SCORED_WHILE_SAMPLING, met=(False,))
    num_workers: int | None = option(None, minimum=1, unit="threads or processes")
    """Replaced by reward.num_workers."""
    sandbox_fusion: SandboxFusionConfig = nested(SandboxFusionConfig)
    profiler: ProfilerConfig = nested(ProfilerConfig)
    rollout: RewardRolloutConfig = nested(RewardRolloutConfig)
    megatron: RewardMegatronConfig = nested(RewardMegatronConfig)

    @property
    def is_served(self) -> bool:
        """Whether scores come from a server."""
        return self.enable and self.rollout.name is not None

    @property
    def has_worker(self) -> bool:
        """Whether ranks of this run hold the model."""
        return self.enable and self.rollout.name in (None, "native")

    @property
    def sleeps(self) -> bool:
        """Whether its server answers only while nothing else computes."""
        shares = self.is_served and self.has_worker and not self.enable_resource_pool
        return shares and self.rollout.free_cache_engine

    @property
    def scores_later(self) -> bool:
        """Whether it scores answers only when all have been sampled."""
        return self.sleeps or (self.enable and not self.is_served)


@dataclass
class CustomRewardFunctionConfig(ConfigGroup):
    path: str | None = None
    """File, `file://` or `pkg://` that holds the score function; null: scored by data source."""
    name: str = "compute_score"
    """Name of the function."""
    reward_kwargs: dict[str, Any] = mapping()
    """Further arguments of every call."""


@dataclass
class RewardManagerModuleConfig:
    path: str | None = None
    """File, `file://` or `pkg://` that holds the manager's class, for source=importlib."""
    name: str = "custom_reward_manager"
    """Name of the class."""


@dataclass
class RewardManagerConfig(ConfigGroup):
    source: str = option("register", choices=("register", "importlib"))
    """Where the manager comes from: a registered name, or a class in a custom file."""
    name: str = II("reward_model.reward_manager")
    """Name of the manager."""
    module: RewardManagerModuleConfig = nested(RewardManagerModuleConfig)


@dataclass
class RewardConfig(ConfigGroup):
    on_failure: str = option("mask", choices=("mask", "zero"))
    """A sample that could not be scored is left out of the update, or counts as scored 0."""
    timeout: float | None = option(300.0, minimum=0.001, unit="seconds")
    """How long a call of the score function may take; null: for ever."""
    streaming: bool = True
    """Score each response as soon as it is sampled, during sampling; false: all afterwards."""
    num_workers: int | None = option(
        II("reward_model.num_workers"), minimum=1, unit="threads or processes"
    )
    """Score functions that run at once in a process; null: 1 thread, or 1 process a CPU core."""
    log_keys: list[str] = listed()
    """Numbers that the score function returns beside the score, whose mean, std, max and min are
    metrics of each step, `reward/KEY/mean` and so on."""


# ---- Checks

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


def check_path_given(
    config: CustomRewardFunctionConfig | RewardManagerModuleConfig, group: str
) -> None:
    """What belongs to a custom function or manager comes with its file."""
    for key, field, value in walk(config, f"{group}."):
        if config.path is None and value != default_of(field):
            raise ConfigError(f"{key}={shown(value)}: needs {group}.path=...")


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
