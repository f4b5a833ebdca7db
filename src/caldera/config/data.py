"""The keys of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from caldera.config.fields import ConfigGroup, mapping, nested, option, refused
from caldera.config.reasons import (
    NO_DATAGEN,
    NO_IMAGES,
    NO_SHARED_MEMORY,
    OTHER_KEY_OF_TOOLS,
)


@dataclass
class CustomClassConfig(ConfigGroup):
    path: str | None = None
    """File, `file://` or `pkg://` that holds the class."""
    name: str | None = None
    """Name of the class."""


@dataclass
class SamplerConfig(ConfigGroup):
    class_path: str | None = None
    """File, `file://` or `pkg://` of a custom sampler, such as a curriculum."""
    class_name: str | None = None
    """Name of the sampler's class."""


@dataclass
class DatagenConfig:
    path: str | None = refused(None, NO_DATAGEN)
    name: str | None = refused(None, NO_DATAGEN)


@dataclass
class DataConfig(ConfigGroup):
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; null: the model's."""
    use_shm: bool = refused(False, NO_SHARED_MEMORY)
    train_files: Any = None
    """Training prompts: files (parquet, JSON, JSON lines, CSV, Arrow), a folder of them, or a data
    set of the Hugging Face Hub such as openai/gsm8k:main/train. Required."""
    val_files: Any = None
    """Files with the validation prompts; null: no validation."""
    train_max_samples: int = option(-1, unit="rows")
    """Most training rows; -1: all."""
    val_max_samples: int = option(-1, unit="rows")
    """Most validation rows; -1: all."""
    prompt_key: str = "prompt"
    """Column with the prompt: plain text, or chat messages."""
    apply_chat_template: bool | None = None
    """Plain text becomes a message of the user in the chat template; false: it is tokenized as it
    is; null: true where the tokenizer has a template."""
    reward_fn_key: str = "data_source"
    """Column that picks the scorer. Files may lack it where a custom function or a reward model
    scores."""
    max_prompt_length: int = option(512, minimum=1, unit="tokens")
    """Most tokens of a prompt."""
    max_response_length: int = option(512, minimum=1, unit="tokens")
    """Most tokens of a response."""
    max_start_length: int | None = option(None, minimum=1, unit="tokens")
    """With do_search: most tokens of a prompt; null: max_prompt_length."""
    max_obs_length: int = option(512, minimum=1, unit="tokens")
    """search_agent: most tokens of what a search brings."""
    train_batch_size: int | None = option(None, minimum=1, unit="prompts")
    """Prompts per training step; null: 1024, or as many as a smaller data set has."""
    gen_batch_size: int | None = option(None, minimum=1, unit="prompts")
    """Prompts that are sampled at a time with algorithm.filter_groups; null: train_batch_size."""
    val_batch_size: int | None = option(None, minimum=1, unit="prompts")
    """Prompts per validation batch; null: all at once."""
    tool_config_path: str | None = refused(
        II("actor_rollout_ref.rollout.multi_turn.tool_config_path"), OTHER_KEY_OF_TOOLS
    )
    return_raw_input_ids: bool = refused(False, "raw_prompt_ids is always in the row")
    return_raw_chat: bool = True
    """Keep the chat messages in the row, as raw_prompt."""
    return_full_prompt: bool = False
    """Keep the templated text in the row, as full_prompts."""
    shuffle: bool = True
    """Draw training prompts in random order."""
    seed: int | None = None
    """Seed of that order; null: rollout.seed."""
    dataloader_num_workers: int = option(0, minimum=0, unit="processes")
    """Processes that prepare rows; 0: this one."""
    validation_shuffle: bool = False
    """Shuffle the validation rows."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length instead of treating them by `truncation`."""
    filter_overlong_prompts_workers: int = option(1, minimum=1, unit="processes")
    """Processes that measure prompts for the filter."""
    truncation: str = option("error", choices=("error", "left", "right", "middle"))
    """What happens to a prompt that is too long: an error, or which part is cut away."""
    image_key: str = refused("images", NO_IMAGES)
    video_key: str = refused("videos", NO_IMAGES)
    image_patch_size: int = refused(14, NO_IMAGES)
    return_multi_modal_inputs: bool = refused(True, NO_IMAGES)
    trust_remote_code: bool = False
    """Whether code that comes with the tokenizer may run."""
    custom_cls: CustomClassConfig = nested(CustomClassConfig)
    custom: dict[str, Any] = II("custom")
    """Follows `custom`, the place to set keys for custom code."""
    sampler: SamplerConfig = nested(SamplerConfig)
    datagen: DatagenConfig = nested(DatagenConfig)
    apply_chat_template_kwargs: dict[str, Any] = mapping()
    """Further arguments of the chat template."""
