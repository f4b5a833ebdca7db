"""Training on pairs of responses: reward models, and direct preference optimisation.

Rows 2i and 2i + 1 of a batch are the chosen and the rejected response of pair i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from caldera.config import SFTTrainerConfig
from caldera.config.preference import DPOTrainerConfig
from caldera.core_algos import LossScale, PairMetrics, bradley_terry_loss, dpo_loss, masked_sum
from caldera.data import Batch, create_preference_dataset, engine_rows
from caldera.engine import LossAndMetrics, LossFn, Outputs
from caldera.errors import DataError
from caldera.models.loading import build_policy, build_sequence_classifier
from caldera.protocol import DataProto, tensors_of
from caldera.workers.supervised import Objective

PAIR = 2


def pair_batch(items: Sequence[dict[str, Any]], pad_id: int) -> Batch:
    """Two rows for each item, and the margins (B,) where the items have them."""
    names = ("chosen", "rejected")
    batch = engine_rows([_tokens_and_mask(item, name) for item in items for name in names], pad_id)
    with_margin = [item for item in items if "margin" in item]
    if with_margin:
        if len(with_margin) < len(items):
            raise DataError("some rows of the data set have a margin, others not (data.custom_cls)")
        margins = torch.tensor([item["margin"] for item in items])
        batch["margin"] = margins.repeat_interleave(PAIR)
    return batch


def _tokens_and_mask(item: dict[str, Any], name: str) -> tuple[list[int], list[int]]:
    value: Any = item.get(name)
    is_pair = isinstance(value, tuple | list) and len(value) == PAIR
    if not is_pair or not all(isinstance(one, list) and len(one) == len(value[0]) for one in value):
        raise DataError(
            f"a row of the data set has no {name!r} with a list of tokens and a mask of the same "
            f"length (data.custom_cls); it has {', '.join(item)}"
        )
    ids, mask = value
    return ids, mask


def scoring_loss(config: SFTTrainerConfig) -> LossFn:
    """Bradley-Terry of the scores at the responses' last tokens."""

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        scores = outputs["scores"].sum(1)  # (B,), which are 0 but at one token
        margin = tensors_of(rows).get("margin", None)
        margin = None if margin is None else margin[::PAIR]
        return _shares(*bradley_terry_loss(*_both(scores), margin), scale)

    return loss_fn


def direct_loss(config: SFTTrainerConfig) -> LossFn:
    """DPO of the log-probabilities of whole responses."""
    dpo = cast(DPOTrainerConfig, config).dpo

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        tensors = tensors_of(rows)
        mask = tensors["response_mask"]  # (B, R)
        reference = None
        if not dpo.reference_free:
            reference = _both(masked_sum(tensors["ref_log_prob"], mask, dim=1))
        chosen, rejected = _both(masked_sum(outputs["log_probs"], mask, dim=1))
        losses, metrics = dpo_loss(
            chosen, rejected, reference, dpo.beta, dpo.label_smoothing, dpo.loss_type
        )
        return _shares(losses, metrics, scale)

    return loss_fn


def uses_reference(config: SFTTrainerConfig) -> bool:
    return not cast(DPOTrainerConfig, config).dpo.reference_free


def _both(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of the chosen and of the rejected responses, (B / 2,) each."""
    return values[::PAIR], values[1::PAIR]


def _shares(losses: Tensor, metrics: PairMetrics, scale: LossScale) -> LossAndMetrics:
    loss = scale.group_mean(losses, PAIR)
    told = {name: scale.group_mean(value, PAIR) for name, value in metrics.items()}
    return loss, {"loss": loss.detach(), **told}


REWARD_MODEL = Objective(
    name="rm",
    dataset=create_preference_dataset,
    collate=pair_batch,
    build=build_sequence_classifier,
    outputs=("scores",),
    loss=scoring_loss,
    rows_together=PAIR,
)
"""A reward model: chosen responses get higher scores than rejected ones."""

DIRECT = Objective(
    name="dpo",
    dataset=create_preference_dataset,
    collate=pair_batch,
    build=build_policy,
    outputs=("log_probs",),
    loss=direct_loss,
    rows_together=PAIR,
    needs_reference=uses_reference,
)
"""Direct preference optimisation: chosen responses become likelier than rejected ones."""
