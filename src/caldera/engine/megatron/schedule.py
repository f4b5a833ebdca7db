"""Passes of all micro-batches through the pipeline, by Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from caldera.engine.megatron.groups import Places
from caldera.engine.packing import PackedRows

Told = TypeVar("Told")


def train_all(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[[int, Tensor], tuple[Tensor, Told]],
) -> list[Told]:
    """Gradients of the sum of the losses, averaged over the ranks that have different tokens.

    `finish` makes a loss of the hidden states of the numbered micro-batch, on the last stage, where
    alone something comes back: what it tells besides the loss, of each micro-batch in order.
    """

    def loss(number: int, hidden: Tensor) -> tuple[Tensor, Told]:
        found, told = finish(number, hidden)
        # Megatron divides by the number of micro-batches, and multiplies by that of the ranks that
        # share their tokens.
        return found * (len(batches) / places.sequence.size), told

    return _run(stages, batches, places, loss, forward_only=False)


def infer_all(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[[int, Tensor], Told],
) -> list[Told]:
    """What `finish` makes of each micro-batch's hidden states, on the last stage."""

    def outputs(number: int, hidden: Tensor, non_loss_data: bool) -> Told:
        return finish(number, hidden)

    return _run(stages, batches, places, outputs, forward_only=True, collect_non_loss_data=True)


def _run(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[..., Any],
    **options: bool,
) -> list[Any]:
    def forward(numbered: Iterator[tuple[int, PackedRows]], stage: nn.Module) -> tuple[Any, Any]:
        number, packed = next(numbered)
        hidden = stage(packed.input_ids, packed.position_ids, packed.context)
        return hidden, partial(finish, number)

    virtual = places.virtual_stages if places.virtual_stages > 1 else None
    run = get_forward_backward_func(pp_size=places.pp_size, vp_size=virtual)
    numbered = [iter(list(enumerate(batches))) for _ in stages]
    found: list[Any] = run(
        forward_step_func=forward,
        data_iterator=numbered if virtual else numbered[0],
        model=stages if virtual else stages[0],
        num_microbatches=len(batches),
        seq_length=1,  # told by each sender: micro-batches are of different lengths
        micro_batch_size=1,
        **options,
    )
    return found
