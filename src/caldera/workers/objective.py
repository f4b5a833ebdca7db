"""What supervised training minimises, and on which rows: one value for each kind of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from caldera.config import SFTDataConfig, SFTTrainerConfig
from caldera.core_algos import LossScale
from caldera.data import Batch, create_sft_dataset, token_batch
from caldera.data.loader import RowSource
from caldera.engine import LossAndMetrics, LossFn, OutputName, Outputs
from caldera.models.loading import Built, build_policy
from caldera.protocol import DataProto, tensors_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_KEY = "model"


def never(config: SFTTrainerConfig) -> bool:
    return False


@dataclass(frozen=True)
class Objective:
    """One kind of supervised training. It travels to other processes, so its functions are those
    of modules."""

    name: str
    dataset: Callable[[list[str], SFTDataConfig, PreTrainedTokenizerBase], RowSource]
    """(files, the keys of the data, tokenizer) -> items."""
    collate: Callable[[Sequence[dict[str, Any]], int], Batch]
    """(items, padding token) -> rows as engines take them, `rows_together` for each item: the first
    token is the prompt, all others are the response, and response_mask has what is trained."""
    build: Callable[[SFTTrainerConfig, torch.dtype, int, bool], Built]
    """(config, precision, seed, whether it is to be without values) -> the model."""
    outputs: tuple[OutputName, ...]
    """What the loss reads of the model."""
    loss: Callable[[SFTTrainerConfig], LossFn]
    """Its metrics are logged as train/NAME and val/NAME. Validation gives it the outputs of whole
    batches, and the counts of the whole validation set."""
    rows_together: int = 1
    """How many rows an item is: those of one are never apart, on ranks or in micro-batches."""
    needs_reference: Callable[[SFTTrainerConfig], bool] = never
    """Whether rows get `ref_log_prob`, those of the model as it was before the run."""


def likelihood_loss(config: SFTTrainerConfig) -> LossFn:
    """Minus the mean log-probability of the trained tokens."""

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        mask = tensors_of(rows)["response_mask"]  # (B, R)
        loss = scale.aggregate(-outputs["log_probs"], mask, "token-mean")
        return loss, {"loss": loss.detach()}

    return loss_fn


def language_model(config: SFTTrainerConfig, dtype: torch.dtype, seed: int, empty: bool) -> Built:
    return build_policy(config.model, dtype, seed, MODEL_KEY, empty)


FINE_TUNING = Objective(
    name="sft",
    dataset=create_sft_dataset,
    collate=token_batch,
    build=language_model,
    outputs=("log_probs",),
    loss=likelihood_loss,
)
"""Supervised fine-tuning: the answers of the data become likely."""
