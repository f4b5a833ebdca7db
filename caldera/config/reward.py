"""The keys of scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.actor import STRATEGIES
from caldera.config.fields import mapping, nested, option, refused
from caldera.config.megatron import RewardMegatronConfig
from caldera.config.profiling import ProfilerConfig
from caldera.config.reasons import (
    ALWAYS_PACKED,
    NO_SANDBOX,
    NO_SHARED_MEMORY,
    ONE_REWARD_LOOP,
    ONE_TIMEOUT,
    WEIGHTS_ARE_READ,
)

NO_LANGUAGE_HEAD = "a reward model has no language head; leave the key out"
NO_REWARD_SERVER = "the reward model is a worker of the run, not a server"
SAME_TOKENS = "the reward model reads the actor's own tokens in this release"
SCORED_WHOLE = "prompts and answers are scored whole"


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
    input_tokenizer: str | None = refused(
        II("actor_rollout_ref.model.path"), SAME_TOKENS, met=(None,)
    )
    path: str | None = "~/models/FsfairX-LLaMA3-RM-v0.1"
    """Folder or hub name of the reward model: a sequence classifier of one label."""
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
class RewardRolloutConfig:
    """The server of a reward model."""

    name: str | None = refused(None, NO_REWARD_SERVER)
    dtype: str = refused("bfloat16", NO_REWARD_SERVER)
    gpu_memory_utilization: float = refused(0.5, NO_REWARD_SERVER)
    enforce_eager: bool = refused(True, NO_REWARD_SERVER)
    cudagraph_capture_sizes: list[int] | None = refused(None, NO_REWARD_SERVER)
    free_cache_engine: bool = refused(True, NO_REWARD_SERVER)
    data_parallel_size: int = refused(1, NO_REWARD_SERVER)
    expert_parallel_size: int = refused(1, NO_REWARD_SERVER)
    tensor_model_parallel_size: int = refused(2, NO_REWARD_SERVER)
    max_num_batched_tokens: int = refused(8192, NO_REWARD_SERVER)
    max_model_len: int | None = refused(None, NO_REWARD_SERVER)
    max_num_seqs: int = refused(1024, NO_REWARD_SERVER)
    load_format: str = refused("auto", NO_REWARD_SERVER)
    engine_kwargs: dict[str, Any] = refused({}, NO_REWARD_SERVER)
    limit_images: int | None = refused(None, NO_REWARD_SERVER)
    enable_chunked_prefill: bool = refused(True, NO_REWARD_SERVER)
    enable_prefix_caching: bool = refused(True, NO_REWARD_SERVER)
    disable_log_stats: bool = refused(True, NO_REWARD_SERVER)
    skip_tokenizer_init: bool = refused(False, NO_REWARD_SERVER)
    prompt_length: int = refused(2048, NO_REWARD_SERVER)
    response_length: int = refused(2048, NO_REWARD_SERVER)


@dataclass
class SandboxFusionConfig:
    url: str | None = refused(None, NO_SANDBOX)
    max_concurrent: int = refused(64, NO_SANDBOX)
    memory_limit_mb: int = refused(1024, NO_SANDBOX)


@dataclass
class RewardModelConfig:
    enable: bool = False
    """Score answers with a model."""
    enable_resource_pool: bool = False
    """Give the reward model devices of its own; else it shares those of the other models."""
    n_gpus_per_node: int = option(8, minimum=1, unit="devices")
    """Devices a node of its own, where it has any."""
    nnodes: int = option(0, minimum=0, unit="nodes")
    """Nodes of its own, where it has any."""
    strategy: str = option("fsdp", choices=STRATEGIES)
    """Engine of the reward model."""
    model: RewardModelModelConfig = nested(RewardModelModelConfig)
    micro_batch_size: int | None = option(None, minimum=1, unit="samples")
    """Deprecated: samples per pass over all devices; micro_batch_size_per_gpu says it now."""
    micro_batch_size_per_gpu: int | None = option(None, minimum=1, unit="samples")
    """Samples per forward pass on one device."""
    max_length: int | None = refused(None, SCORED_WHOLE)
    use_dynamic_bsz: bool = II("critic.use_dynamic_bsz")
    """Form micro-batches by tokens instead of by samples."""
    forward_max_token_len_per_gpu: int = option(
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
    reward_loop_source: str = refused("register", ONE_REWARD_LOOP)
    reward_loop_module_path: str | None = refused(None, ONE_REWARD_LOOP)
    reward_loop_class_name: str | None = refused(None, ONE_REWARD_LOOP)
    launch_reward_fn_async: bool = refused(False, ONE_REWARD_LOOP)
    use_reward_loop: bool = refused(True, ONE_REWARD_LOOP, met=(False,))
    num_workers: int = refused(1, ONE_REWARD_LOOP, met=(8,))
    sandbox_fusion: SandboxFusionConfig = nested(SandboxFusionConfig)
    profiler: ProfilerConfig = nested(ProfilerConfig)
    rollout: RewardRolloutConfig = nested(RewardRolloutConfig)
    megatron: RewardMegatronConfig = nested(RewardMegatronConfig)


@dataclass
class CustomRewardFunctionConfig:
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
class RewardManagerConfig:
    source: str = option("register", choices=("register", "importlib"))
    """Where the manager comes from: a registered name, or a class in one's own file."""
    name: str = II("reward_model.reward_manager")
    """Name of the manager."""
    module: RewardManagerModuleConfig = nested(RewardManagerModuleConfig)
