"""From the config of a Hugging Face model to Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional as F
from transformers import PreTrainedConfig

from caldera.config.megatron import MegatronConfig
from caldera.engine.base import EngineOptions
from caldera.errors import ConfigError, UnsupportedError

DENSE = ("llama", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
"""Values of `model_type` that are known here."""


def transformer_config(
    model: PreTrainedConfig, options: EngineOptions, device: torch.device, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's description of the model's layers, and of how they are spread and recomputed."""
    megatron = options.megatron
    assert megatron is not None
    _check_model(model)
    _check_layout(model, megatron)
    virtual = megatron.virtual_pipeline_model_parallel_size
    sizes: dict[str, Any] = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": head_width(model),
        "ffn_hidden_size": model.intermediate_size,
        "layernorm_epsilon": model.rms_norm_eps,
        "qk_layernorm": model.model_type.startswith("qwen3"),
        "add_qkv_bias": model.model_type == "qwen2",
    }
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": is_sequence_parallel(megatron),
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # which alone takes sequences of any length
        # Interleaved stages that exchange in batches mix up what they receive.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    }
    return TransformerConfig(
        **sizes,
        **parallel,
        **_recomputation(megatron, options.gradient_checkpointing),
        **_experts(model),
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
    )


def head_width(model: PreTrainedConfig) -> int:
    """Numbers in one head's query."""
    told = getattr(model, "head_dim", None)
    return int(told or model.hidden_size // model.num_attention_heads)


def is_sequence_parallel(megatron: MegatronConfig) -> bool:
    """Whether tensor-parallel ranks share what is between the cut matrices; one rank has all."""
    return megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1


def has_experts(model: PreTrainedConfig, layer: int) -> bool:
    """Whether a decoder layer, counted from 0, is a mixture of experts."""
    if model.model_type not in MIXTURES:
        return False
    step = getattr(model, "decoder_sparse_step", 1)
    return layer not in (getattr(model, "mlp_only_layers", None) or ()) and (layer + 1) % step == 0


def expert_count(model: PreTrainedConfig) -> int:
    return int(getattr(model, "num_local_experts", None) or model.num_experts)


def _experts(model: PreTrainedConfig) -> dict[str, Any]:
    if model.model_type not in MIXTURES:
        return {}
    return {
        "num_moe_experts": expert_count(model),
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(model, "moe_intermediate_size", model.intermediate_size),
        # Softmax over the chosen experts alone is softmax over all, made to add up to 1.
        "moe_router_pre_softmax": not getattr(model, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": [
            int(has_experts(model, layer)) for layer in range(model.num_hidden_layers)
        ],
    }


def _recomputation(megatron: MegatronConfig, is_wanted: bool) -> dict[str, Any]:
    told = megatron.override_transformer_config
    if told.recompute_granularity is None and not is_wanted:
        return {}
    if told.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": told.recompute_modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": told.recompute_method or "uniform",
        "recompute_num_layers": told.recompute_num_layers or 1,
    }


def _check_model(model: PreTrainedConfig) -> None:
    known = (*DENSE, *MIXTURES)
    if model.model_type not in known:
        raise UnsupportedError(
            f"strategy=megatron: a model of type {model.model_type!r} is not known; known are "
            f"{', '.join(known)}"
        )
    kinds = getattr(model, "layer_types", None) or ()
    by_type = model.model_type == "mixtral" and model.sliding_window is not None
    if by_type or any("sliding" in kind for kind in kinds):
        raise UnsupportedError(
            "strategy=megatron: the model has sliding-window attention; strategy=fsdp2 can"
        )
    if model.hidden_act != "silu":
        raise UnsupportedError(f"strategy=megatron: hidden_act={model.hidden_act!r}; takes silu")
    if getattr(model, "router_jitter_noise", 0):
        raise UnsupportedError(
            f"strategy=megatron: router_jitter_noise={model.router_jitter_noise}; takes 0"
        )


def _check_layout(model: PreTrainedConfig, megatron: MegatronConfig) -> None:
    tensor, context = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    stages = megatron.pipeline_model_parallel_size
    virtual = megatron.virtual_pipeline_model_parallel_size or 1
    for key, size, what, count in (
        ("tensor_model_parallel_size", tensor, "num_key_value_heads", model.num_key_value_heads),
        ("tensor_model_parallel_size", tensor, "num_attention_heads", model.num_attention_heads),
        ("tensor_model_parallel_size", tensor, "intermediate_size", model.intermediate_size),
        (
            "context_parallel_size",
            context,
            "num_attention_heads / tensor_model_parallel_size",
            model.num_attention_heads // tensor,
        ),
        (
            "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size",
            stages * virtual,
            "num_hidden_layers",
            model.num_hidden_layers,
        ),
    ):
        if count % size:
            raise ConfigError(f"megatron.{key}={size} does not divide the model's {what}={count}")
    rope = (getattr(model, "rope_parameters", None) or {}).get("rope_type", "default")
    if context > 1 and rope in ("dynamic", "longrope"):
        raise ConfigError(
            f"megatron.context_parallel_size={context}: the model's rotary embedding ({rope}) "
            "depends on the longest sequence, of which each rank would see a part; takes 1"
        )
    _check_experts(model, megatron)


def _check_experts(model: PreTrainedConfig, megatron: MegatronConfig) -> None:
    experts = megatron.expert_model_parallel_size
    if model.model_type not in MIXTURES:
        if experts > 1:
            raise ConfigError(
                f"megatron.expert_model_parallel_size={experts}: the model has no experts; takes 1"
            )
        return
    if expert_count(model) % experts:
        raise ConfigError(
            f"megatron.expert_model_parallel_size={experts} does not divide the model's "
            f"{expert_count(model)} experts"
        )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        raise ConfigError(
            "megatron.sequence_parallel=False: a mixture of experts with "
            f"megatron.tensor_model_parallel_size={megatron.tensor_model_parallel_size} takes True"
        )
