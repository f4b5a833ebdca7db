"""From the last stage's hidden states to what a plan asks for."""

from __future__ import annotations

from typing import cast

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import functional as F

from caldera.engine.base import ForwardPlan, Outputs
from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.head import VocabularyPart, cut_head_outputs
from caldera.engine.megatron.stage import Stage
from caldera.engine.packing import PackedRows
from caldera.models.head import head_outputs


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
