"""The keys of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import ConfigGroup, mapping, nested, option, precision, refused
from caldera.config.model import MtpConfig
from caldera.config.profiling import RolloutProfilerConfig
from caldera.config.reasons import (
    NO_CUSTOM_SERVER,
    NO_PROMETHEUS,
    NO_ROUTER_REPLAY,
    NO_TRANSFER,
)

NAMED_BY_MODEL = "weights go to samplers under Hugging Face's names"
SHARED_MATRICES = "devices share an engine by its matrices alone (tensor_model_parallel_size)"
QUANTIZED = "samplers use the trainer's weights, which are not quantised"


@dataclass
class PenaltyKeys(ConfigGroup):
    """What changes a token's chances beside temperature, top_k and top_p, under vLLM's names."""

    min_p: float = option(0.0, minimum=0, maximum=1, unit="share of the most likely probability")
    """Only tokens of at least this share of the most likely one's probability may be drawn; 0:
    all."""
    repetition_penalty: float = option(1.0, minimum=0)
    """Logits of tokens that prompt or answer have are divided by it, or multiplied if negative; 1:
    none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has; 0: none."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the answer has it; 0: none."""


@dataclass
class StopKeys(ConfigGroup):
    stop_token_ids: list[int] | None = None
    """Tokens that end an answer beside the model's end tokens. They stay in the answer, and are
    trained."""
    stop: list[str] | None = None
    """Strings that end an answer. The token that completes one is the answer's last, so the text of
    the string stays in the answer, and is trained."""


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
    """Most answers of a trajectory; null: as many as the response has room for."""
    max_user_turns: int | None = option(None, minimum=1, unit="turns")
    """Most times that tools or an interaction answer; null: as above."""
    tool_config_path: str | None = None
    """YAML file of the tools."""
    function_tool_path: str | None = None
    """Python file or module whose functions with @function_tool are tools."""
    max_parallel_calls: int = option(1, minimum=1, unit="calls")
    """Calls of one answer that are run, at the same time."""
    max_tool_response_length: int = option(256, minimum=1, unit="characters")
    """Most that a tool tells the model; the rest is cut."""
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
    num_repeat_rollouts: int | None = refused(None, "rollout.n says how many answers a prompt has")


@dataclass
class CustomServerConfig:
    path: str | None = refused(None, NO_CUSTOM_SERVER)
    name: str | None = refused(None, NO_CUSTOM_SERVER)


@dataclass
class AgentConfig:
    num_workers: int = refused(8, "trajectories are tasks in the processes that sample")
    default_agent_loop: str = "single_turn_agent"
    """Loop of rows that have no agent_name: single_turn_agent, tool_agent, react_agent,
    search_agent, or one of your own."""
    agent_loop_config_path: str | None = None
    """YAML file of loops of your own."""
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
    """Traced answers of each process in a step, and in a validation; null: all."""
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
class RemoteConfig:
    url: str | None = None
    """rollout.name=remote: address of an OpenAI-compatible server that takes and gives token ids,
    such as http://host:8000. It cannot be trained: for generation and serving."""
    model: str | None = None
    """What the server calls the model; null: the only one that it has."""


@dataclass
class RolloutConfig(StopKeys, PenaltyKeys):
    name: str | None = None
    """Sampler: native, hf, vllm, sglang, remote; null: native."""
    mode: str = option("async", choices=("sync", "async"))
    """How the trainer waits. A sample depends on its seed alone, so both give the same ones."""
    temperature: float = option(1.0, minimum=0)
    """Divisor of the logits in sampling and in training log-probs."""
    top_k: int = option(-1, minimum=-1, unit="tokens")
    """Most likely tokens that may be drawn; -1: all."""
    top_p: float = option(1.0, minimum=0, maximum=1, unit="probability")
    """Probability mass that may be drawn."""
    do_sample: bool = True
    """Sample; false: greedy."""
    n: int = option(1, minimum=1, unit="samples a prompt")
    """Answers per prompt."""
    seed: int = 42
    """Root of every sample's seed, with step, prompt and repetition."""
    prompt_length: int = option(II("data.max_prompt_length"), minimum=1, unit="tokens")
    """Width of the padded prompts."""
    response_length: int = option(II("data.max_response_length"), minimum=1, unit="tokens")
    """Most tokens of an answer."""
    dtype: str | None = precision(None)
    """Precision of sampling; null: that of the parameters on a CPU, bfloat16 on CUDA."""
    gpu_memory_utilization: float = option(0.5, minimum=0, maximum=1, unit="share of memory")
    """Memory of the GPU that weights and cache may fill while sampling."""
    ignore_eos: bool = False
    """Go on to the full length whatever is sampled."""
    enforce_eager: bool = False
    """Run the model as transformers writes it, in the native sampler: on CUDA neither compiled nor
    recorded, on a CPU without packed copies of the weights. Slow, and quick to start."""
    cudagraph_capture_sizes: list[int] | None = None
    """On CUDA, batch sizes of which steps are recorded; null: the sampler's own."""
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
    enable_chunked_prefill: bool = False
    """Run prompts in pieces beside the decoding, which whole ones interrupt on CUDA. Not for hf."""
    enable_prefix_caching: bool = False
    """Keep the cache of ended requests for those that begin alike. Not for hf."""
    max_num_batched_tokens: int = option(8192, minimum=1, unit="tokens")
    """Tokens that one forward pass takes: of whole prompts, or of all that it runs if chunked."""
    max_model_len: int | None = option(None, minimum=1, unit="tokens")
    """Most tokens of prompt and answer together; null: prompt_length + response_length."""
    max_num_seqs: int = option(256, minimum=1, unit="sequences")
    """Sequences that are decoded at the same time."""
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
    log_prob_use_dynamic_bsz: bool = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Form these micro-batches by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: int = option(
        II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"), minimum=1, unit="tokens"
    )
    """Tokens per micro-batch then."""
    over_sample_rate: float = refused(0, "every answer is waited for")
    multi_stage_wake_up: bool = False
    """vLLM and SGLang on CUDA: take memory for the cache only after the weights have come."""
    layered_summon: bool = refused(False, "weights go over one tensor at a time anyway")
    skip_rollout: bool = refused(False, "answers are sampled anew")
    skip_dump_dir: str = refused(
        "/tmp/rollout_dump", "answers are sampled anew", met=("~/.verl/rollout_dump",)
    )
    skip_tokenizer_init: bool = refused(True, "engines get tokens and give tokens")
    enable_rollout_routing_replay: bool = refused(False, NO_ROUTER_REPLAY)
    quantization: str | None = refused(None, QUANTIZED)
    quantization_config_file: str | None = refused(None, QUANTIZED)
    engine_kwargs: dict[str, Any] = mapping(vllm={}, sglang={}, trtllm={})
    """Further arguments of vLLM (EngineArgs) and SGLang (Engine), by sampler; others have none."""
    engine_python: str | None = None
    """Python that has vLLM or SGLang, which then runs in a process of its own; null: this one."""
    native: NativeRolloutConfig = nested(NativeRolloutConfig)
    remote: RemoteConfig = nested(RemoteConfig)
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
