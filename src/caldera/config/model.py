"""The keys of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import ConfigGroup, mapping, nested, option, refused
from caldera.config.megatron import MegatronLoraConfig
from caldera.config.optim import FSDPConfig
from caldera.config.reasons import (
    ALWAYS_PACKED,
    COMPUTED_HEAD,
    NO_MTP,
    NO_SHARED_MEMORY,
)

NO_TILES = "layers are computed whole"


@dataclass
class FusedKernelConfig:
    impl_backend: str = refused("torch", COMPUTED_HEAD)


@dataclass
class TiledMlpConfig:
    enabled: bool = refused(False, NO_TILES)
    num_shards: int = refused(4, NO_TILES)


@dataclass
class MtpConfig:
    enable: bool = refused(False, NO_MTP)
    enable_train: bool = refused(False, NO_MTP)
    enable_rollout: bool = refused(False, NO_MTP)
    detach_encoder: bool = refused(False, NO_MTP)
    mtp_loss_scaling_factor: float = refused(0.1, NO_MTP)
    speculative_algorithm: str = refused("EAGLE", NO_MTP)
    speculative_num_steps: int = refused(2, NO_MTP, met=(3,))
    speculative_eagle_topk: int = refused(2, NO_MTP, met=(1,))
    speculative_num_draft_tokens: int = refused(4, NO_MTP)
    method: str = refused("mtp", NO_MTP)
    num_speculative_tokens: int = refused(1, NO_MTP)


@dataclass
class ModelConfig(ConfigGroup):
    path: str | None = None
    """Folder or hub name of the Hugging Face model. Required."""
    hf_config_path: str | None = refused(None, "the config comes from model.path")
    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; null: model.path."""
    use_shm: bool = refused(False, NO_SHARED_MEMORY)
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    custom_chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    external_lib: str | None = None
    """Modules, separated by commas, that are imported before the model is built."""
    override_config: dict[str, Any] = mapping()
    """Values that replace those of the model's config.json."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass to save memory."""
    enable_activation_offload: bool = False
    """Keep what the backward pass needs in host memory meanwhile."""
    use_remove_padding: bool = refused(True, ALWAYS_PACKED)
    lora_rank: int = option(0, minimum=0)
    """Rank of the LoRA adapter; 0 trains all parameters."""
    lora_alpha: int = option(16, minimum=1)
    """Scale of the LoRA adapter."""
    target_modules: Any = "all-linear"
    """Module names that get an adapter: a list, or `all-linear`."""
    exclude_modules: Any = None
    """Module names that get none: a list or a regular expression."""
    lora_adapter_path: str | None = None
    """Folder of a saved LoRA adapter to start from, at its own rank and alpha; null: a new one."""
    use_liger: bool = False
    """Compute norms, rotary embeddings and gated layers with Liger's kernels; needs CUDA."""
    use_fused_kernels: bool = refused(False, COMPUTED_HEAD)
    fused_kernel_options: FusedKernelConfig = nested(FusedKernelConfig)
    tiled_mlp: TiledMlpConfig = nested(TiledMlpConfig)
    mtp: MtpConfig = nested(MtpConfig)
    lora: MegatronLoraConfig = nested(MegatronLoraConfig)

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the model's own parameters are not."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass
class CriticModelConfig(ModelConfig):
    path: str | None = II("actor_rollout_ref.model.path")
    """Folder or hub name of the model that the critic starts from."""
    tokenizer_path: str | None = II("actor_rollout_ref.model.path")
    """Folder or hub name of the tokenizer."""
    external_lib: str | None = II("actor_rollout_ref.model.external_lib")
    """Modules that are imported before the model is built."""
    trust_remote_code: bool = II("actor_rollout_ref.model.trust_remote_code")
    """Whether code that comes with the model may run."""
    fsdp_config: FSDPConfig = nested(FSDPConfig)
    """Precision and memory of the critic."""
