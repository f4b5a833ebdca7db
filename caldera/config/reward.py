"""The keys of scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import mapping, nested, option, refused
from caldera.config.megatron import RewardMegatronConfig
from caldera.config.profiling import ProfilerConfig
from caldera.config.reasons import NO_REWARD_MODEL, NO_SANDBOX, ONE_REWARD_LOOP


@dataclass
class RewardFSDPConfig:
    @dataclass
    class WrapPolicy:
        min_num_params: int = refused(0, NO_REWARD_MODEL)

    wrap_policy: WrapPolicy = nested(WrapPolicy)
    param_offload: bool = refused(False, NO_REWARD_MODEL)
    reshard_after_forward: bool = refused(True, NO_REWARD_MODEL)
    fsdp_size: int = refused(-1, NO_REWARD_MODEL)
    forward_prefetch: bool = refused(False, NO_REWARD_MODEL)


@dataclass
class RewardModelModelConfig:
    input_tokenizer: str | None = refused(II("actor_rollout_ref.model.path"), NO_REWARD_MODEL)
    path: str | None = refused("~/models/FsfairX-LLaMA3-RM-v0.1", NO_REWARD_MODEL)
    external_lib: str | None = refused(II("actor_rollout_ref.model.external_lib"), NO_REWARD_MODEL)
    trust_remote_code: bool = refused(False, NO_REWARD_MODEL)
    override_config: dict[str, Any] = refused({}, NO_REWARD_MODEL)
    use_shm: bool = refused(False, NO_REWARD_MODEL)
    use_remove_padding: bool = refused(False, NO_REWARD_MODEL)
    use_fused_kernels: bool = refused(
        II("actor_rollout_ref.model.use_fused_kernels"), NO_REWARD_MODEL
    )
    fsdp_config: RewardFSDPConfig = nested(RewardFSDPConfig)


@dataclass
class RewardRolloutConfig:
    """The server of a reward model."""

    name: str | None = refused(None, NO_REWARD_MODEL)
    dtype: str = refused("bfloat16", NO_REWARD_MODEL)
    gpu_memory_utilization: float = refused(0.5, NO_REWARD_MODEL)
    enforce_eager: bool = refused(True, NO_REWARD_MODEL)
    cudagraph_capture_sizes: list[int] | None = refused(None, NO_REWARD_MODEL)
    free_cache_engine: bool = refused(True, NO_REWARD_MODEL)
    data_parallel_size: int = refused(1, NO_REWARD_MODEL)
    expert_parallel_size: int = refused(1, NO_REWARD_MODEL)
    tensor_model_parallel_size: int = refused(2, NO_REWARD_MODEL)
    max_num_batched_tokens: int = refused(8192, NO_REWARD_MODEL)
    max_model_len: int | None = refused(None, NO_REWARD_MODEL)
    max_num_seqs: int = refused(1024, NO_REWARD_MODEL)
    load_format: str = refused("auto", NO_REWARD_MODEL)
    engine_kwargs: dict[str, Any] = refused({}, NO_REWARD_MODEL)
    limit_images: int | None = refused(None, NO_REWARD_MODEL)
    enable_chunked_prefill: bool = refused(True, NO_REWARD_MODEL)
    enable_prefix_caching: bool = refused(True, NO_REWARD_MODEL)
    disable_log_stats: bool = refused(True, NO_REWARD_MODEL)
    skip_tokenizer_init: bool = refused(False, NO_REWARD_MODEL)
    prompt_length: int = refused(2048, NO_REWARD_MODEL)
    response_length: int = refused(2048, NO_REWARD_MODEL)


@dataclass
class SandboxFusionConfig:
    url: str | None = refused(None, NO_SANDBOX)
    max_concurrent: int = refused(64, NO_SANDBOX)
    memory_limit_mb: int = refused(1024, NO_SANDBOX)


@dataclass
class RewardModelConfig:
    enable: bool = refused(False, NO_REWARD_MODEL)
    enable_resource_pool: bool = refused(False, NO_REWARD_MODEL)
    n_gpus_per_node: int = refused(8, NO_REWARD_MODEL)
    nnodes: int = refused(0, NO_REWARD_MODEL)
    strategy: str = refused("fsdp", NO_REWARD_MODEL, met=("fsdp2", "megatron"))
    model: RewardModelModelConfig = nested(RewardModelModelConfig)
    micro_batch_size: int | None = refused(None, NO_REWARD_MODEL)
    micro_batch_size_per_gpu: int | None = refused(None, NO_REWARD_MODEL)
    max_length: int | None = refused(None, NO_REWARD_MODEL)
    use_dynamic_bsz: bool = refused(II("critic.use_dynamic_bsz"), NO_REWARD_MODEL)
    forward_max_token_len_per_gpu: int = refused(
        II("critic.forward_max_token_len_per_gpu"), NO_REWARD_MODEL
    )
    ulysses_sequence_parallel_size: int = refused(1, NO_REWARD_MODEL)
    nccl_timeout: int = refused(600, NO_REWARD_MODEL)
    load_weight: bool = refused(True, NO_REWARD_MODEL)
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
