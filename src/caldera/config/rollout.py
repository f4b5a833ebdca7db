"""The keys of sampling."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import II

from caldera.config.fields import mapping, nested, option, refused
from caldera.config.model import MtpConfig
from caldera.config.profiling import RolloutProfilerConfig
from caldera.config.reasons import (
    NO_CUSTOM_SERVER,
    NO_PROMETHEUS,
    NO_ROUTER_REPLAY,
    NO_TRANSFER,
)
from caldera.config.samplers import (
    ENGINE_KWARGS,
    KEY,
    NOT_SERVED,
    SAMPLERS,
    TENSOR_PARALLEL,
    BatchingKeys,
    PenaltyKeys,
    SamplerKeys,
    SamplerTraits,
    StopKeys,
    check_parameters,
    check_stops,
    check_taken,
    is_taken,
    one_of,
    takers_of,
    trained_samplers,
)
from caldera.errors import ConfigError, UnsupportedError

NAMED_BY_MODEL = "weights go to samplers under Hugging Face's names"
SHARED_MATRICES = "devices share an engine by its matrices alone (tensor_model_parallel_size)"
QUANTIZED = "samplers use the trainer's weights, which are not quantised"


@dataclass
class ValKwargs(PenaltyKeys):
    top_k: int = option(-1, minimum=-1, unit="tokens")
    """Most likely tokens that may be drawn; -1: all."""
    top_p: float = option(1.0, minimum=0, maximum=1, unit="probability")
    """Probability mass that may be drawn."""
    temperature: float = option(0.0, minimum=0)
    """Divisor of the logits; 0: greedy."""
    n: int = option(1, minimum=1, unit="samples a prompt")
    """Answers per validation prompt."""
    do_sample: bool = False
    """Sample; false: greedy."""


@dataclass
class MultiTurnConfig:
    enable: bool = False
    """Sample by agent loops, even if all rows ask for the one of a single turn."""
    max_assistant_turns: int | None = option(None, minimum=1, unit="turns")
    """Most turns of the policy in a trajectory; null: as many as the response has room for."""
    max_user_turns: int | None = option(None, minimum=1, unit="turns")
    """Most turns of tools and interactions in a trajectory; null: as above."""
    tool_config_path: str | None = None
    """YAML file of the tools."""
    function_tool_path: str | None = None
    """Python file or module whose functions with @function_tool are tools."""
    max_parallel_calls: int = option(1, minimum=1, unit="calls")
    """Tool calls of one turn that are run, in parallel."""
    max_tool_response_length: int = option(256, minimum=1, unit="characters")
    """Longest tool response; the rest is cut."""
    tool_response_truncate_side: str = option("middle", choices=("left", "middle", "right"))
    """What is kept then: left the head, right the tail, middle half of each."""
    interaction_config_path: str | None = None
    """YAML file of the interactions."""
    use_inference_chat_template: bool = refused(False, "sampled tokens stay as they were sampled")
    tokenization_sanity_check_mode: str = option(
        "strict", choices=("strict", "disable", "ignore_strippable")
    )
    """Whether the start checks that the chat template can have turns appended: disable does not,
    the others do alike, since nothing is encoded again that could differ in white space."""
    format: str = "hermes"
    """How the model writes tool calls: hermes, openai, qwen3_coder, gpt-oss, react."""
    turn_rewards: str = option("trajectory", choices=("trajectory", "turn", "mixed"))
    """Reward: the scorer's on the last token; what tools and interactions gave each turn, on that
    turn's last token; or both."""
    num_repeat_rollouts: int | None = refused(None, "rollout.n is the number of responses a prompt")


@dataclass
class CustomServerConfig:
    path: str | None = refused(None, NO_CUSTOM_SERVER)
    name: str | None = refused(None, NO_CUSTOM_SERVER)


@dataclass
class AgentConfig:
    num_workers: int = refused(8, "trajectories are tasks in the processes that sample")
    default_agent_loop: str = "single_turn_agent"
    """Loop of rows that have no agent_name: single_turn_agent, tool_agent, react_agent,
    search_agent, or a custom one."""
    agent_loop_config_path: str | None = None
    """YAML file of custom loops."""
    max_concurrent: int | None = option(None, minimum=1, unit="trajectories a process")
    """Trajectories that run at the same time; null: all of the batch."""
    custom_async_server: CustomServerConfig = nested(CustomServerConfig)


@dataclass
class CheckpointEngineConfig:
    backend: str = refused("naive", NO_TRANSFER)
    update_weights_bucket_megabytes: int = option(2048, minimum=1, unit="MiB")
    """vLLM and SGLang: size of the files in shared memory in which weights go over."""
    engine_kwargs: dict[str, Any] = refused({}, NO_TRANSFER)


@dataclass
class TraceConfig:
    backend: str | None = None
    """Where single trajectories are shown, span by span: mlflow, trackio; null: nowhere."""
    token2text: bool = False
    """Write tokens as text, too."""
    max_samples_per_step_per_worker: int | None = option(None, minimum=0, unit="samples")
    """Traced responses of each process in a step, and in a validation; null: all."""
    project_name: str | None = None
    """What the back end calls the project; null: trainer.project_name."""
    experiment_name: str | None = None
    """What it calls the run; null: trainer.experiment_name."""


@dataclass
class PrometheusConfig:
    enable: bool = refused(False, NO_PROMETHEUS)
    port: int = refused(9090, NO_PROMETHEUS)
    file: str = refused("/tmp/ray/session_latest/metrics/prometheus/prometheus.yml", NO_PROMETHEUS)
    served_model_name: str | None = refused(II("actor_rollout_ref.model.path"), NO_PROMETHEUS)


@dataclass
class LayerNameMap:
    qkv_layer_name: str = refused("qkv", NAMED_BY_MODEL)
    gate_proj_layer_name: str = refused("gate_up", NAMED_BY_MODEL)


@dataclass
class NativeRolloutConfig:
    exact: bool = False
    """Log-probs of sampler and trainer are equal to the bit, at some cost in speed."""


@dataclass
class RolloutConfig(StopKeys, PenaltyKeys, SamplerKeys):
    mode: str = option("async", choices=("sync", "async"))
    """How the trainer waits. A sample depends only on its seed, so both give the same ones."""
    temperature: float = option(1.0, minimum=0)
    """Divisor of the logits in sampling and in training log-probs."""
    top_k: int = option(-1, minimum=-1, unit="tokens")
    """Most likely tokens that may be drawn; -1: all."""
    top_p: float = option(1.0, minimum=0, maximum=1, unit="probability")
    """Probability mass that may be drawn."""
    do_sample: bool = True
    """Sample; false: greedy."""
    n: int = option(1, minimum=1, unit="samples a prompt")
    """Responses to each prompt. Not given, it is 8 for an estimator that compares them, such as
    grpo."""
    prompt_length: int = option(II("data.max_prompt_length"), minimum=1, unit="tokens")
    """Width of the padded prompts."""
    response_length: int = option(II("data.max_response_length"), minimum=1, unit="tokens")
    """Most tokens of a response."""
    ignore_eos: bool = False
    """Go on to the full length whatever is sampled."""
    enforce_eager: bool = False
    """Run the model as transformers writes it, in the native sampler: on CUDA neither compiled nor
    captured in CUDA graphs, on a CPU without packed copies of the weights.
    Slow, and quick to start."""
    cudagraph_capture_sizes: list[int] | None = None
    """On CUDA, batch sizes for which CUDA graphs are captured; null: the sampler's own."""
    free_cache_engine: bool = True
    """Return the cache's memory while training."""
    load_format: str = refused("dummy", "samplers use the trainer's weights; leave the key out")
    tensor_model_parallel_size: int = option(1, minimum=1, unit="devices")
    """Native: ranks that sample together, each with its part of every layer and of the cache. vLLM
    and SGLang: ranks of a node whose devices one engine uses; in a run of one process, devices of
    those that it sees."""
    data_parallel_size: int = option(1, minimum=1, unit="engines")
    """vLLM and SGLang with engine_python: engines of each worker, which share its requests."""
    expert_parallel_size: int = refused(1, SHARED_MATRICES)
    pipeline_model_parallel_size: int = refused(1, SHARED_MATRICES)
    kv_cache_blocks: int | None = option(None, minimum=1, unit="pages of 16 tokens")
    """Native sampler: size of the key/value cache; null: fitted to memory and requests."""
    logprobs_mode: str = option(
        "processed_logprobs", choices=("processed_logprobs", "raw_logprobs")
    )
    """Log-probs of samples after temperature and filters, or before."""
    scheduling_policy: str = refused("fcfs", "requests are served in order")
    disable_log_stats: bool = True
    """vLLM and SGLang: keep no statistics of their own."""
    calculate_log_probs: bool = True
    """Keep the log-prob of each sampled token in the batch."""
    log_prob_micro_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Deprecated: samples per pass over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward pass when log-probs are recomputed."""
    log_prob_use_dynamic_bsz: bool | None = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form these micro-batches by tokens instead of by samples; null: where no size in samples is
    given."""
    log_prob_max_token_len_per_gpu: int | None = option(
        II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"), minimum=1, unit="tokens"
    )
    """Tokens per micro-batch then."""
    over_sample_rate: float = refused(0, "every response is waited for")
    multi_stage_wake_up: bool = False
    """vLLM and SGLang on CUDA: take memory for the cache only after the weights have come."""
    layered_summon: bool = refused(False, "weights go over one tensor at a time anyway")
    skip_rollout: bool = refused(False, "responses are sampled anew")
    skip_dump_dir: str = refused(
        "/tmp/rollout_dump", "responses are sampled anew", met=("~/.verl/rollout_dump",)
    )
    skip_tokenizer_init: bool = refused(True, "engines get tokens and give tokens")
    enable_rollout_routing_replay: bool = refused(False, NO_ROUTER_REPLAY)
    quantization: str | None = refused(None, QUANTIZED)
    quantization_config_file: str | None = refused(None, QUANTIZED)
    engine_kwargs: dict[str, Any] = mapping(vllm={}, sglang={}, trtllm={})
    """Further arguments of vLLM (EngineArgs) and SGLang (Engine), by sampler; others have none."""
    native: NativeRolloutConfig = nested(NativeRolloutConfig)
    val_kwargs: ValKwargs = nested(ValKwargs)
    multi_turn: MultiTurnConfig = nested(MultiTurnConfig)
    agent: AgentConfig = nested(AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = nested(CheckpointEngineConfig)
    trace: TraceConfig = nested(TraceConfig)
    prometheus: PrometheusConfig = nested(PrometheusConfig)
    profiler: RolloutProfilerConfig = nested(RolloutProfilerConfig)
    mtp: MtpConfig = nested(MtpConfig)
    layer_name_map: LayerNameMap = nested(LayerNameMap)

    @property
    def longest_sequence(self) -> int:
        """Most tokens of prompt and answer."""
        return self.max_model_len or self.prompt_length + self.response_length


# ---- Samplers outside training


def sampler_config(keys: BatchingKeys, **others: Any) -> RolloutConfig:
    """What samplers take, of a command that does not train: its keys under their names, and others
    by theirs."""
    shared = (BatchingKeys, SamplerKeys, PenaltyKeys, StopKeys)
    names = {field.name for kind in shared if isinstance(keys, kind) for field in fields(kind)}
    values = {name: getattr(keys, name) for name in names}
    if isinstance(keys, SamplerKeys):
        values[ENGINE_KWARGS] = {keys.sampler: keys.engine_kwargs}
    return RolloutConfig(**(values | others))


# ---- Checks

TRACE_BACKENDS = ("mlflow", "trackio")


def check_rollout(config: RolloutConfig, traits: SamplerTraits | None) -> None:
    """Every key that is set is one that the sampler takes, or the first that is not raises.
    `traits` is what the sampler declares; None: it is a custom one that is not loaded yet."""
    name = config.sampler
    _check_trained(config, name, traits)
    if config.trace.backend not in (None, *TRACE_BACKENDS):
        raise UnsupportedError(
            f"{KEY}.trace.backend={config.trace.backend!r} is not part of this release; takes "
            f"{', '.join(TRACE_BACKENDS)}"
        )
    check_stops(config, config.ignore_eos, KEY)
    groups: dict[str, RolloutConfig | ValKwargs] = {
        KEY: config,
        f"{KEY}.val_kwargs": config.val_kwargs,
    }
    for group, keys in groups.items():
        check_parameters(keys, traits, f"{KEY}.name={name}", group, trains=True)
    if traits is None:
        return
    ranks = config.tensor_model_parallel_size
    if ranks > 1 and config.native.exact and traits.ranks != "engine":
        raise UnsupportedError(
            f"{KEY}.native.exact=True with {KEY}.{TENSOR_PARALLEL}={ranks}: sums over ranks have "
            f"another order than the trainer's; takes {KEY}.{TENSOR_PARALLEL}=1"
        )
    check_taken(config, traits, name, KEY, trains=True)
    _check_engine_kwargs(config, traits, name)
    if traits.log_probs_before_filters and _reports_processed(config):
        for group, keys in groups.items():
            _check_filters(keys, group, name)


def _check_trained(config: RolloutConfig, name: str, traits: SamplerTraits | None) -> None:
    """The sampler can be trained."""
    trained = ", ".join(trained_samplers())
    if name in NOT_SERVED:
        raise UnsupportedError(f"{KEY}.name={name!r} is not part of this release; takes {trained}")
    if traits is not None and not traits.takes_weights:
        raise UnsupportedError(
            f"{KEY}.name={name!r}: a remote server does not take the weights that training "
            f"makes; takes {trained}"
        )
    for key, value in {"url": config.remote.url, "model": config.remote.model}.items():
        if value is not None:
            raise UnsupportedError(
                f"{KEY}.remote.{key}={value!r}: a remote server cannot be trained"
            )


def _reports_processed(config: RolloutConfig) -> bool:
    return config.calculate_log_probs and config.logprobs_mode == "processed_logprobs"


def _check_filters(keys: RolloutConfig | ValKwargs, group: str, name: str) -> None:
    if not keys.do_sample:
        return
    others = one_of(
        each for each in trained_samplers() if not SAMPLERS[each].log_probs_before_filters
    )
    for key in ("top_k", "top_p", "min_p"):
        value = getattr(keys, key)
        if value != getattr(RolloutConfig, key) and (key, value) != ("top_k", 0):
            raise UnsupportedError(
                f"{group}.{key}={value}: {KEY}.name={name} reports log-probs from before this "
                f"filter. Takes {KEY}.logprobs_mode=raw_logprobs, {KEY}.calculate_log_probs=False, "
                f"or {KEY}.name={others}"
            )


def _check_engine_kwargs(config: RolloutConfig, traits: SamplerTraits, name: str) -> None:
    """Arguments are those of the engine that samples."""
    for sampler, given in _without_nulls(config.engine_kwargs).items():
        if sampler == name and is_taken(traits, ENGINE_KWARGS, trains=True):
            if not isinstance(given, dict):
                raise ConfigError(f"{KEY}.engine_kwargs.{sampler}={given!r}: takes a group of keys")
            continue
        known = SAMPLERS.get(sampler)
        if known is not None and ENGINE_KWARGS in known.takes:
            takes = f"takes {KEY}.name={sampler}, not {name}"
        else:
            takes = f"takes {takers_of(ENGINE_KWARGS)}, not {sampler}"
        raise UnsupportedError(f"{KEY}.engine_kwargs.{sampler}={given!r}: {takes}")


def _without_nulls(extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are given: null stands for one that is not."""
    items = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in extra.items()}
    return {key: value for key, value in items.items() if value is not None and value != {}}
