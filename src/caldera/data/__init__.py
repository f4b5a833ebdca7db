"""From data files to token batches: data sets, loaders and padding."""

from __future__ import annotations

from caldera.data.chat import chat_messages, hf_tokenizer, render_chat, tokenize_chat
from caldera.data.create import (
    create_preference_dataset,
    create_rl_dataset,
    create_sft_dataset,
)
from caldera.data.files import read_rows
from caldera.data.importing import chosen_class, load_object, registered_or_own
from caldera.data.loader import (
    Batch,
    FixedLoader,
    StatefulLoader,
    collate_fn,
    compute_position_ids,
    create_train_loader,
    create_val_loader,
    left_pad,
    object_array,
    right_pad,
    truncate,
)
from caldera.data.preference_dataset import PreferenceDataset
from caldera.data.rl_dataset import RLHFDataset, fitting_prompts, prompt_lengths
from caldera.data.sampler import AbstractCurriculumSampler, AbstractSampler, create_sampler
from caldera.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, engine_rows, token_batch

__all__ = [
    "AbstractCurriculumSampler",
    "AbstractSampler",
    "Batch",
    "FixedLoader",
    "MultiTurnSFTDataset",
    "PreferenceDataset",
    "RLHFDataset",
    "SFTDataset",
    "StatefulLoader",
    "chat_messages",
    "chosen_class",
    "collate_fn",
    "compute_position_ids",
    "create_preference_dataset",
    "create_rl_dataset",
    "create_sampler",
    "create_sft_dataset",
    "create_train_loader",
    "create_val_loader",
    "engine_rows",
    "fitting_prompts",
    "hf_tokenizer",
    "left_pad",
    "load_object",
    "object_array",
    "prompt_lengths",
    "read_rows",
    "registered_or_own",
    "render_chat",
    "right_pad",
    "token_batch",
    "tokenize_chat",
    "truncate",
]
