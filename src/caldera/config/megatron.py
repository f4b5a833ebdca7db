"""The keys of the Megatron engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import listed, nested, option, precision, refused
from caldera.config.reasons import ALWAYS_PACKED, DECIDED_BY_ROLE

LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""Megatron's groups of ranks are one arrangement for all models of a process."""
OPTIMIZER_OVERRIDES = {"adam": ("eps",), "sgd": ("momentum",)}
"""Further arguments of Megatron's optimisers, by torch's names."""

ACTOR = "actor_rollout_ref.actor.megatron"
OF_TORCH = "checkpoints are in torch's distributed format, which every strategy reads"
OWN_BRIDGE = "weights are always read from and written to Hugging Face's files"
NO_MEGATRON_LORA = "adapters are trained by local, fsdp and fsdp2, which take model.lora_rank"
NOT_TRAINED = "this model is not trained"
FLOAT32_GRADIENTS = "gradients are reduced in float32, when all of a step's are there"
EVEN_STAGES = "every pipeline stage has as many layers"
WHOLE_EXPERTS = "an expert is whole on its rank"
OWN_ATTENTION = "attention over packed sequences is the engine's own"
FROM_HUGGING_FACE = "the model is its config.json's; model.override_config changes that"


@dataclass
class TransformerOverrides:
    recompute_granularity: str | None = option(None, choices=("full", "selective"))
    """What the backward pass computes again: `full`, layers; `selective`, recompute_modules; null:
    layers where the model's enable_gradient_checkpointing is on."""
    recompute_modules: list[str] = listed("core_attn")
    """Parts of a layer that `selective` computes again."""
    recompute_method: str | None = option(None, choices=("uniform", "block"))
    """`full`: all layers in groups of recompute_num_layers, or the first so many of a stage; null:
    uniform."""
    recompute_num_layers: int | None = option(None, minimum=1, unit="layers")
    """`full`: layers of a group, or of the block; null: 1."""
    attention_backend: str = refused("flash", OWN_ATTENTION, met=("auto",))
    num_layers_in_first_pipeline_stage: int | None = refused(None, EVEN_STAGES)
    num_layers_in_last_pipeline_stage: int | None = refused(None, EVEN_STAGES)


@dataclass
class MegatronConfig:
    """How Megatron lays a model out, and what it keeps in host memory."""

    param_offload: bool = False
    """Keep parameters in host memory between phases (on a GPU)."""
    grad_offload: bool = False
    """Give the memory of gradients back between updates (on a GPU)."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in host memory between updates (on a GPU)."""
    tensor_model_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the matrices of each layer."""
    expert_model_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the experts of each layer."""
    expert_tensor_parallel_size: int | None = refused(None, WHOLE_EXPERTS, met=(1,))
    pipeline_model_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the layers: each has a stage of the model."""
    virtual_pipeline_model_parallel_size: int | None = option(None, minimum=2, unit="stages")
    """Stages of a rank, which are interleaved with those of the others; null: one."""
    context_parallel_size: int = option(1, minimum=1, unit="ranks")
    """Ranks that share the tokens of each micro-batch."""
    sequence_parallel: bool = True
    """Ranks that share matrices share the tokens between them too; off where one rank has all."""
    use_distributed_optimizer: bool = True
    """Share the optimiser's state among the ranks that have the same parameters."""
    use_dist_checkpointing: bool = refused(False, OF_TORCH)
    dist_checkpointing_path: str | None = refused(None, OF_TORCH)
    dist_checkpointing_prefix: str = refused("", OF_TORCH)
    seed: int = 42
    """Seed of freshly initialised weights, such as a value head."""
    override_ddp_config: dict[str, Any] = refused({}, FLOAT32_GRADIENTS)
    override_transformer_config: TransformerOverrides = nested(TransformerOverrides)
    override_mcore_model_config: dict[str, Any] = refused({}, FROM_HUGGING_FACE)
    use_mbridge: bool = refused(True, OWN_BRIDGE, met=(False,))
    vanilla_mbridge: bool = refused(True, OWN_BRIDGE, met=(False,))
    use_remove_padding: bool = refused(True, ALWAYS_PACKED)
    forward_only: bool = refused(False, DECIDED_BY_ROLE)
    dtype: str | None = precision(None)
    """Precision of parameters and computation; null: bfloat16 on CUDA, float32 on a CPU. The
    optimiser keeps parameters in float32."""

    @property
    def ranks_of_a_copy(self) -> int:
        """Ranks that have the same rows of a batch, and share one copy of the model."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )


@dataclass
class FrozenMegatronConfig(MegatronConfig):
    """Of a model that is not trained: it has neither gradients nor an optimiser."""

    grad_offload: bool = refused(False, NOT_TRAINED)
    optimizer_offload: bool = refused(False, NOT_TRAINED)
    use_distributed_optimizer: bool = refused(True, NOT_TRAINED, met=(False,))
    seed: int = II(f"{ACTOR}.seed")
    """Follows the actor's."""
    override_transformer_config: TransformerOverrides = refused(
        II(f"{ACTOR}.override_transformer_config"), NOT_TRAINED
    )
    use_mbridge: bool = refused(II(f"{ACTOR}.use_mbridge"), OWN_BRIDGE, met=(True, False))
    vanilla_mbridge: bool = refused(II(f"{ACTOR}.vanilla_mbridge"), OWN_BRIDGE, met=(True, False))
    use_remove_padding: bool = refused(II(f"{ACTOR}.use_remove_padding"), ALWAYS_PACKED)


@dataclass
class RefMegatronConfig(FrozenMegatronConfig):
    """Of the reference, which lies as the actor does."""

    param_offload: bool = II(f"{ACTOR}.param_offload")
    """Keep parameters in host memory between phases (on a GPU)."""
    tensor_model_parallel_size: int = option(
        II(f"{ACTOR}.tensor_model_parallel_size"), minimum=1, unit="ranks"
    )
    """Ranks that share the matrices of each layer."""
    expert_model_parallel_size: int = option(
        II(f"{ACTOR}.expert_model_parallel_size"), minimum=1, unit="ranks"
    )
    """Ranks that share the experts of each layer."""
    expert_tensor_parallel_size: int | None = refused(
        II(f"{ACTOR}.expert_tensor_parallel_size"), WHOLE_EXPERTS, met=(None, 1)
    )
    pipeline_model_parallel_size: int = option(
        II(f"{ACTOR}.pipeline_model_parallel_size"), minimum=1, unit="ranks"
    )
    """Ranks that share the layers."""
    virtual_pipeline_model_parallel_size: int | None = option(
        II(f"{ACTOR}.virtual_pipeline_model_parallel_size"), minimum=2, unit="stages"
    )
    """Stages of a rank."""
    context_parallel_size: int = option(
        II(f"{ACTOR}.context_parallel_size"), minimum=1, unit="ranks"
    )
    """Ranks that share the tokens of each micro-batch."""
    forward_only: bool = refused(True, DECIDED_BY_ROLE)


@dataclass
class RewardMegatronConfig(FrozenMegatronConfig):
    use_distributed_optimizer: bool = refused(False, NOT_TRAINED, met=(True,))


@dataclass
class MegatronLoraConfig:
    """Adapters of Megatron; those of the other engines are model.lora_rank and its neighbours."""

    type: str = refused("lora", NO_MEGATRON_LORA)
    merge: bool = refused(False, NO_MEGATRON_LORA)
    rank: int = refused(0, NO_MEGATRON_LORA)
    alpha: int = refused(32, NO_MEGATRON_LORA)
    dropout: float = refused(0.0, NO_MEGATRON_LORA)
    target_modules: list[str] = refused(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], NO_MEGATRON_LORA
    )
    exclude_modules: list[str] = refused([], NO_MEGATRON_LORA)
    dropout_position: str = refused("pre", NO_MEGATRON_LORA)
    lora_A_init_method: str = refused("xavier", NO_MEGATRON_LORA)
    lora_B_init_method: str = refused("zero", NO_MEGATRON_LORA)
    a2a_experimental: bool = refused(False, NO_MEGATRON_LORA)
    dtype: str | None = refused(None, NO_MEGATRON_LORA)
    adapter_path: str | None = refused(None, NO_MEGATRON_LORA)
    freeze_vision_model: bool = refused(True, NO_MEGATRON_LORA)
    freeze_vision_projection: bool = refused(True, NO_MEGATRON_LORA)
    freeze_language_model: bool = refused(True, NO_MEGATRON_LORA)
