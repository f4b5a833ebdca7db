"""The configurations of generating answers to a file, and of scoring such a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import mapping, nested, option, precision
from caldera.config.ppo import RayConfig
from caldera.config.reward import CustomRewardFunctionConfig
from caldera.config.rollout import PenaltyKeys, RemoteConfig, StopKeys


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
class GenerationRolloutConfig(StopKeys, PenaltyKeys):
    name: str | None = None
    """Sampler: native, hf, vllm, sglang, remote; null: native."""
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
    """Most tokens of an answer."""
    seed: int = 42
    """Root of every sample's seed."""
    dtype: str | None = precision(None)
    """Precision of sampling; null: bfloat16 on CUDA, float32 on a CPU."""
    gpu_memory_utilization: float = option(0.5, minimum=0, maximum=1, unit="share of memory")
    """Memory of the GPU that weights and cache may fill."""
    tensor_model_parallel_size: int = option(1, minimum=1, unit="devices")
    """vLLM and SGLang: devices that share one engine: those of as many ranks on one node, or, of a
    run with one rank, those that it sees."""
    engine_python: str | None = None
    """Python that has vLLM or SGLang, which then runs in a process of its own; null: this one."""
    engine_kwargs: dict[str, Any] = mapping()
    """Further arguments of vLLM (EngineArgs) or SGLang (Engine)."""
    remote: RemoteConfig = nested(RemoteConfig)
    max_num_batched_tokens: int = option(8192, minimum=1, unit="tokens")
    """Prompt tokens that one forward pass of the sampler takes."""
    max_num_seqs: int = option(256, minimum=1, unit="sequences")
    """Sequences that are decoded at the same time, by each device or by the server."""
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


@dataclass
class EvaluationDataConfig:
    path: str | None = None
    """Parquet file with answers. Required."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    response_key: str = "responses"
    """Column with the answers."""
    data_source_key: str = "data_source"
    """Column that picks the scorer."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""
    compare_path: str | None = None
    """A second file with answers to the same prompts, to compare the first with; null: none."""


@dataclass
class EvaluationRunConfig:
    num_workers: int | None = option(None, minimum=1, unit="processes")
    """Processes that score; null: one a core."""
    timeout: float | None = option(300.0, minimum=0.001, unit="seconds")
    """Time that one answer's score may take; then it has failed. null: no limit."""
    pass_score: float = 1.0
    """An answer passes with this score or more; what counts is `acc` where the scorer gives it."""
    output_dir: str | None = None
    """Folder for NAME.evaluation.json and NAME.evaluation.html; null: that of data.path."""
    shown_answers: int = option(200, minimum=0, unit="answers")
    """Failing answers on the page."""


@dataclass
class EvaluationConfig:
    data: EvaluationDataConfig = nested(EvaluationDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = nested(CustomRewardFunctionConfig)
    evaluation: EvaluationRunConfig = nested(EvaluationRunConfig)
