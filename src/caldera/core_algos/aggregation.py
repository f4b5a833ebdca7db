"""Sums and means over the elements that a mask keeps, and a loss per token made one number.

That number does not depend on the micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caldera.config.actor import LOSS_AGG_MODES
from caldera.errors import ConfigError, DataError, ProtocolError

_EPS = 1e-8


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is 1, zero elsewhere; neither values nor gradients leak through."""
    return values.masked_fill(~mask.bool(), 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return zero_outside(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over (count + 1e-8): an empty mask has mean 0."""
    return masked_sum(values, mask, dim) / (mask.bool().sum(dim) + _EPS)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance; it takes two elements at least."""
    count = int(mask.bool().sum())
    if count <= 1:
        raise DataError(f"a variance needs at least 2 unmasked elements, the mask keeps {count}")
    return masked_sum((values - masked_mean(values, mask)).square(), mask) / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale all values so that those in the mask have mean 0 and variance 1."""
    scale = torch.rsqrt(masked_var(values, mask) + _EPS)
    return (values - masked_mean(values, mask)) * scale


# ---- Entropy of the next-token distribution


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, in float32 at least.

    A logit of -inf (a token that is ruled out) adds nothing, to the value and to the gradient.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = logits.log_softmax(-1, dtype=dtype)
    log_probs = log_probs.clamp(min=torch.finfo(dtype).min)  # 0 * -inf would be NaN
    return -(log_probs.exp() * log_probs).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """The same, `chunk_size` rows at a time: without gradients, no second tensor of the logits'
    size is ever held."""
    rows = logits.reshape(-1, logits.shape[-1])  # (N, V)
    chunks = [entropy_from_logits(chunk) for chunk in torch.split(rows, chunk_size)]
    return torch.cat(chunks).view(logits.shape[:-1])


Count = int | Tensor  # a tensor stays on its device: counting need not wait for a GPU


@dataclass(frozen=True, eq=False)
class LossScale:
    """The counts of a whole mini-batch, over all of its micro-batches and ranks."""

    batch_num_tokens: Count | None
    """Tokens in the loss mask; None, in the classic normalisation, counts the matrix at hand."""
    global_batch_size: Count | None
    """Sequences with at least one such token; None as above."""
    dp_size: int = 1
    """Ranks whose gradients are averaged."""
    response_length: int | None = None
    """Width R of the mini-batch, the default divisor of seq-mean-token-sum-norm. Engines that
    trim or pack their micro-batches must give it; None takes the width at hand."""
    weight: float = 1.0
    """Factor of everything that is aggregated: a micro-batch's weight in the classic one."""

    @classmethod
    def from_mask(cls, mask: Tensor, dp_size: int = 1) -> LossScale:
        """The counts of the mini-batch whose whole loss mask this is."""
        kept = mask.bool()  # (B, R)
        return cls(
            batch_num_tokens=kept.sum(),
            global_batch_size=kept.any(-1).sum(),
            dp_size=dp_size,
            response_length=mask.shape[-1],
        )

    @classmethod
    def classic(cls, weight: float, response_length: int | None = None) -> LossScale:
        """The scale of one micro-batch that is aggregated on its own, its result times `weight`.

        The weight is 1 / (number of the rank's micro-batches) when all have the same size, and
        (rows of this one) / (rows of the rank's mini-batch) when they are formed by tokens. Loss
        and gradient then depend on how the mini-batch is cut.
        """
        return cls(None, None, response_length=response_length, weight=weight)

    def aggregate(
        self,
        loss_mat: Tensor,
        loss_mask: Tensor,
        loss_agg_mode: str,
        loss_scale_factor: float | None = None,
    ) -> Tensor:
        """`agg_loss` with these counts."""
        if loss_scale_factor is None:
            loss_scale_factor = self.response_length
        loss = agg_loss(
            loss_mat,
            loss_mask,
            loss_agg_mode,
            dp_size=self.dp_size,
            batch_num_tokens=self.batch_num_tokens,
            global_batch_size=self.global_batch_size,
            loss_scale_factor=loss_scale_factor,
        )
        return loss * self.weight

    def token_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """This micro-batch's share of a metric's mean over the tokens of the mini-batch.

        The shares combine as losses do: sum over micro-batches, mean over ranks.
        """
        return self.aggregate(values.detach(), mask, "token-mean")

    def group_mean(self, values: Tensor, rows: int) -> Tensor:
        """This micro-batch's share of a mean over the groups of the mini-batch.

        `values` are (n,), one a group of so many sequences, all of which have tokens in the loss
        mask. They keep their gradient.
        """
        local = torch.tensor(len(values) * rows, device=values.device)
        sequences = _divisor("global_batch_size", self.global_batch_size, local, self.dp_size)
        return values.sum() * rows / sequences * self.dp_size * self.weight

    def share_of_mean(self, mean: Tensor, mask: Tensor) -> Tensor:
        """The share of a mean that was taken over this micro-batch's tokens, with its gradient."""
        tokens = mask.bool().sum()
        divisor = _divisor("batch_num_tokens", self.batch_num_tokens, tokens, self.dp_size)
        return mean * tokens / divisor * self.dp_size * self.weight


def agg_loss(
    loss_mat: Tensor,  # (B, R)
    loss_mask: Tensor,  # (B, R)
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Reduce a loss matrix to a scalar, in one of LOSS_AGG_MODES.

    Counts that are not given are those of this matrix. A matrix without tokens gives 0, and so
    does its gradient.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(
            f"loss_agg_mode={loss_agg_mode!r} is not one of: {', '.join(LOSS_AGG_MODES)}"
        )
    kept = loss_mask.bool()
    sequence_losses = masked_sum(loss_mat, kept, dim=-1)  # (B,)
    if loss_agg_mode == "seq-mean-token-mean":
        sequence_losses = sequence_losses / (kept.sum(-1) + 1e-8)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        width = loss_mask.shape[-1]
        sequence_losses = sequence_losses / (
            width if loss_scale_factor is None else loss_scale_factor
        )

    total = sequence_losses.sum() * dp_size
    if loss_agg_mode == "token-sum":
        return total
    if loss_agg_mode == "token-mean":
        return total / _divisor("batch_num_tokens", batch_num_tokens, kept.sum(), dp_size)
    return total / _divisor("global_batch_size", global_batch_size, kept.any(-1).sum(), dp_size)


def _divisor(name: str, given: Count | None, local: Tensor, dp_size: int) -> Count:
    """The count to divide by, at least 1 so that nothing over nothing is 0."""
    if given is None and dp_size > 1:
        raise ProtocolError(f"agg_loss with dp_size={dp_size} needs {name} of the whole mini-batch")
    count = local if given is None else given
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
