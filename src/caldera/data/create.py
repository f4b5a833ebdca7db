"""The data set that the configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from caldera.data.importing import load_object
from caldera.data.preference_dataset import PreferenceDataset
from caldera.data.rl_dataset import RLHFDataset
from caldera.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
from caldera.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config import DataConfig, SFTDataConfig


def create_rl_dataset(
    files: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: object | None = None,
    max_samples: int = -1,
) -> Any:
    """An RLHFDataset, or one of the class that `data.custom_cls` names."""
    dataset_class = _own_class(config) or RLHFDataset
    return dataset_class(
        data_files=files,
        tokenizer=tokenizer,
        config=config,
        processor=processor,
        max_samples=max_samples,
    )


def create_sft_dataset(
    files: str | Sequence[str], config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """Prompts with responses, or whole conversations, or the class of `data.custom_cls`."""
    usual = MultiTurnSFTDataset if config.multiturn.enable else SFTDataset
    dataset_class = _own_class(config) or usual
    return dataset_class(parquet_files=files, tokenizer=tokenizer, config=config)


def create_preference_dataset(
    files: str | Sequence[str], config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """Pairs of responses, or the class of `data.custom_cls`."""
    dataset_class: Any = _own_class(config) or PreferenceDataset
    return dataset_class(parquet_files=files, tokenizer=tokenizer, config=config)


def _own_class(config: DataConfig | SFTDataConfig) -> Any:
    """The class that `data.custom_cls` names, if it does."""
    custom = config.custom_cls
    if custom.path is None:
        if custom.name is not None:
            raise ConfigError(
                f"data.custom_cls.name={custom.name!r} is given without data.custom_cls.path"
            )
        return None
    loaded = load_object(custom.path, custom.name, "data.custom_cls")
    if not (isinstance(loaded, type) and issubclass(loaded, Dataset)):
        raise ConfigError(
            f"data.custom_cls: {custom.name!r} of {custom.path} is not a subclass of "
            "torch.utils.data.Dataset"
        )
    return loaded
