"""Log-probs and entropies of each token where the vocabulary is cut over ranks.

As in `caldera.models.head`, logits exist for some rows at a time. Each rank finds out about the
vocabulary that it has; a few numbers for each row then give the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from caldera.engine.base import ForwardPlan, Outputs
from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.stage import Stage
from caldera.engine.packed_model import PackedRows
from caldera.models.head import HeadGradients, HeadOutput, chunk_rows, head_outputs, row_operations

NOWHERE = -1e30
"""The logit of a word that does not exist, and stands for the labels of other ranks. It is finite:
zero times infinity is no number."""


@dataclass(frozen=True)
class VocabularyPart:
    """The run of the vocabulary that this rank has."""

    start: int
    size: int
    """Words; rows of the weight beyond these are padding."""
    group: dist.ProcessGroup


def cut_head_outputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    names: Collection[str],
    part: VocabularyPart,
) -> dict[HeadOutput, Tensor]:
    """`head_outputs` where each rank has some rows of the weight; the same on all ranks.

    hidden (N, H) is the same on all ranks. Each gets the gradient that comes from its own rows, so
    that these have to be added up.
    """
    log_probs, entropy, squares = _CutHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, part, "entropy" in names, "sum_pi_squared" in names
    )
    found: dict[HeadOutput, Tensor] = {
        "log_probs": log_probs,
        "entropy": entropy,
        "sum_pi_squared": squares,
    }
    return {name: value for name, value in found.items() if name in names}


class _CutHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        part: VocabularyPart,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        own = labels - part.start  # (N,)
        is_own = (own >= 0) & (own < part.size)
        own = torch.where(is_own, own, part.size)  # the word that does not exist
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        found = hidden.new_zeros(4, hidden.shape[0], dtype=dtype)
        log_probs, normaliser, entropy, squares = found
        write, _ = row_operations(hidden)
        for rows, logits in _logits_by_chunk(hidden, weight, part.size):
            write(
                logits,
                own[rows],
                temperature,
                log_probs[rows],
                normaliser[rows],
                entropy[rows] if with_entropy else None,
                squares[rows] if with_squares else None,
            )
        # The label's logit after temperature, 0 where another rank has it.
        found[0] = torch.where(is_own, log_probs + normaliser, 0.0)
        label, whole, entropy, squares = _of_all_ranks(found, part.group)
        ctx.save_for_backward(hidden, weight, own, whole, entropy if with_entropy else None)
        ctx.temperature, ctx.size = temperature, part.size
        if with_squares:
            ctx.mark_non_differentiable(squares)
        return label - whole, entropy if with_entropy else None, squares if with_squares else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, own, normaliser, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy = (g if g is None else g.contiguous() for g in grads[:2])
        assert grad_log_probs is not None, "autograd fills in zeros"
        gradients = HeadGradients(ctx.needs_input_grad[:2], hidden, weight[: ctx.size])
        _, slope = row_operations(hidden)
        for rows, logits in _logits_by_chunk(hidden, weight, ctx.size):
            of_logits = slope(
                logits,
                own[rows],
                ctx.temperature,
                normaliser[rows],
                None if entropy is None else entropy[rows],
                grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            gradients.add(rows, of_logits[:, : ctx.size])
        of_weight = gradients.of_weight
        if of_weight is not None and len(of_weight) < len(weight):
            of_weight = torch.cat([of_weight, of_weight.new_zeros(weight[ctx.size :].shape)])
        return gradients.of_hidden, of_weight, None, None, None, None, None


def _logits_by_chunk(hidden: Tensor, weight: Tensor, words: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits (n, words + 1), of which the last is nowhere; in the same memory."""
    count = hidden.shape[0]
    size = chunk_rows(hidden, words + 1, hidden.element_size())
    width = -(-(words + 1) // 16) * 16  # rows begin where kernels read them fast
    buffer = hidden.new_empty(min(count, size), width)[:, : words + 1]
    transposed = weight[:words].to(hidden.dtype).t()
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        logits = buffer[: rows.stop - start]
        torch.mm(hidden[rows], transposed, out=logits[:, :words])
        logits[:, words] = NOWHERE
        yield rows, logits


def _of_all_ranks(found: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Label logits, normalisers, entropies and sums of squares (4, N) of each rank's vocabulary, to
    those of the whole."""
    parts = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, found, group=group)
    label, normaliser, entropy, squares = torch.stack(parts, 1)  # each (ranks, N)
    whole = torch.logsumexp(normaliser, 0)
    share = torch.exp(normaliser - whole)  # of each rank's vocabulary in all probability
    # A rank's entropy is its normaliser less its mean logit.
    mean_logit = (share * (normaliser - entropy)).sum(0)
    return label.sum(0), whole, whole - mean_logit, (share.square() * squares).sum(0)


# ---- From the last stage's hidden states to what a plan asks for


def find_outputs(
    stage: Stage, hidden: Tensor, packed: PackedRows, plan: ForwardPlan, places: Places, words: int
) -> Outputs:
    """Each (B, R), on all ranks that have the last stage of these rows. `words`: the vocabulary."""
    is_cut = stage.has_language_head and places.tp_size > 1
    chosen = _at_places(hidden, packed, stage.config.sequence_parallel, is_cut)  # (n, H)
    weight = stage.head_weight
    if not stage.has_language_head:
        bias = cast(Tensor | None, stage.output_layer.bias)
        values = F.linear(chosen.to(weight.dtype), weight, bias).squeeze(-1)
        precise = values.to(torch.promote_types(values.dtype, torch.float32))
        return {plan.outputs[0]: packed.unpack(precise)}
    if is_cut:
        start = places.tp_rank * len(weight)
        size = min(max(words - start, 0), len(weight))
        part = VocabularyPart(start, size, places.tp_group)
        found = cut_head_outputs(
            chosen, weight, packed.labels, plan.temperature, plan.outputs, part
        )
    else:
        found = head_outputs(chosen, weight, packed.labels, plan.temperature, plan.outputs)
    return {name: packed.unpack(value) for name, value in found.items()}


def _at_places(hidden: Tensor, packed: PackedRows, is_shared: bool, is_cut: bool) -> Tensor:
    """Hidden states (n, H) of the tokens at which something is computed.

    `is_shared`: tensor-parallel ranks have parts of the tokens. `is_cut`: each of them goes on to
    compute another part of the outcome, so that their gradients are added up.
    """
    if is_shared:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=is_cut
        )
    elif is_cut:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, packed.predictors)
