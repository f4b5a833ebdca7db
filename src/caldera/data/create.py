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

_ITEMS_ALONE = "is not called here: override __getitem__ and __len__"
NOT_CALLED: dict[type, dict[str, str]] = {
    RLHFDataset: {
        "_download": "is not called here: override _read_files_and_tokenize, which reads "
        "self.data_files",
        "on_batch_end": "is not called here, since the rows of a run stay the same: "
        "data.sampler.class_path chooses among them after each batch",
    },
    SFTDataset: dict.fromkeys(("_download", "_read_files_and_tokenize"), _ITEMS_ALONE),
    MultiTurnSFTDataset: dict.fromkeys(
        (
            "_download",
            "_read_files_and_process",
            "_build_messages",
            "_process_message_tokens",
            "_process_single_message",
        ),
        _ITEMS_ALONE,
    ),
}
"""Methods that verl calls in subclasses of each class and Caldera does not, with what to do."""


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
    for base, methods in NOT_CALLED.items():
        for method, advice in methods.items():
            if issubclass(loaded, base) and hasattr(loaded, method):
                raise ConfigError(
                    f"data.custom_cls: {custom.name!r} of {custom.path} defines {method}, which "
                    f"{advice}"
                )
    return loaded
