"""The keys of the Megatron engine, which this release does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.fields import nested, refused
from caldera.config.reasons import NO_MEGATRON


@dataclass
class TransformerOverrides:
    recompute_granularity: str | None = refused(None, NO_MEGATRON)
    recompute_modules: list[str] = refused(["core_attn"], NO_MEGATRON)
    recompute_method: str | None = refused(None, NO_MEGATRON)
    recompute_num_layers: int | None = refused(None, NO_MEGATRON)
    attention_backend: str = refused("flash", NO_MEGATRON)


@dataclass
class MegatronConfig:
    """How Megatron lays a model out, and what it keeps in host memory."""

    param_offload: bool = refused(False, NO_MEGATRON)
    grad_offload: bool = refused(False, NO_MEGATRON)
    optimizer_offload: bool = refused(False, NO_MEGATRON)
    tensor_model_parallel_size: int = refused(1, NO_MEGATRON)
    expert_model_parallel_size: int = refused(1, NO_MEGATRON)
    expert_tensor_parallel_size: int | None = refused(None, NO_MEGATRON)
    pipeline_model_parallel_size: int = refused(1, NO_MEGATRON)
    virtual_pipeline_model_parallel_size: int | None = refused(None, NO_MEGATRON)
    context_parallel_size: int = refused(1, NO_MEGATRON)
    sequence_parallel: bool = refused(True, NO_MEGATRON)
    use_distributed_optimizer: bool = refused(True, NO_MEGATRON)
    use_dist_checkpointing: bool = refused(False, NO_MEGATRON)
    dist_checkpointing_path: str | None = refused(None, NO_MEGATRON)
    dist_checkpointing_prefix: str = refused("", NO_MEGATRON)
    seed: int = refused(42, NO_MEGATRON)
    override_ddp_config: dict[str, Any] = refused({}, NO_MEGATRON)
    override_transformer_config: TransformerOverrides = nested(TransformerOverrides)
    override_mcore_model_config: dict[str, Any] = refused({}, NO_MEGATRON)
    use_mbridge: bool = refused(True, NO_MEGATRON)
    vanilla_mbridge: bool = refused(True, NO_MEGATRON, met=(False,))
    use_remove_padding: bool = refused(True, NO_MEGATRON)
    forward_only: bool = refused(False, NO_MEGATRON)
    dtype: str = refused("bfloat16", NO_MEGATRON)


@dataclass
class RefMegatronConfig(MegatronConfig):
    forward_only: bool = refused(True, NO_MEGATRON)


@dataclass
class RewardMegatronConfig(MegatronConfig):
    use_distributed_optimizer: bool = refused(False, NO_MEGATRON)


@dataclass
class MegatronLoraConfig:
    """Adapters of Megatron; those of the other engines are model.lora_rank and its neighbours."""

    type: str = refused("lora", NO_MEGATRON)
    merge: bool = refused(False, NO_MEGATRON)
    rank: int = refused(0, NO_MEGATRON)
    alpha: int = refused(32, NO_MEGATRON)
    dropout: float = refused(0.0, NO_MEGATRON)
    target_modules: list[str] = refused(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], NO_MEGATRON
    )
    exclude_modules: list[str] = refused([], NO_MEGATRON)
    dropout_position: str = refused("pre", NO_MEGATRON)
    lora_A_init_method: str = refused("xavier", NO_MEGATRON)
    lora_B_init_method: str = refused("zero", NO_MEGATRON)
    a2a_experimental: bool = refused(False, NO_MEGATRON)
    dtype: str | None = refused(None, NO_MEGATRON)
    adapter_path: str | None = refused(None, NO_MEGATRON)
    freeze_vision_model: bool = refused(True, NO_MEGATRON)
    freeze_vision_projection: bool = refused(True, NO_MEGATRON)
    freeze_language_model: bool = refused(True, NO_MEGATRON)
