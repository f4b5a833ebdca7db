"""Averages within each micro-batch, for those who compare with programs that take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from caldera.core_algos import LossScale, agg_loss
from caldera.engine import ForwardPlan, LocalEngine, Outputs
from caldera.protocol import DataProto

Make = Callable[..., LocalEngine]
EXACT = ForwardPlan(("log_probs",), False, 2, None)
CLASSIC = replace(EXACT, classic=True)


def loss_fn(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = scale.aggregate(-outputs["log_probs"], rows.batch["response_mask"], "token-mean")
    return loss, {"loss": loss.detach()}


def stepped(make_engine: Make, batch: DataProto, plan: ForwardPlan) -> tuple[float, Tensor]:
    engine = make_engine()
    metrics = engine.train(batch, loss_fn, plan)
    return metrics["loss"].item(), torch.cat(
        [p.detach().flatten() for p in engine.module.parameters()]
    )


@pytest.mark.parametrize(
    ("plan", "cut"),
    [
        (CLASSIC, [[0, 1], [2, 3], [4, 5]]),
        (replace(CLASSIC, micro_batch_size=4), [[0, 1, 2, 3], [4, 5]]),
    ],
    ids=["even", "uneven"],
)
def test_a_micro_batch_weighs_as_many_rows_as_it_has(
    make_engine: Make, batch: DataProto, plan: ForwardPlan, cut: list[list[int]]
) -> None:
    log_probs = make_engine().infer(batch, EXACT)["log_probs"]
    mask = batch.batch["response_mask"]
    means = [agg_loss(-log_probs[rows], mask[rows], "token-mean").item() for rows in cut]
    expected = sum(mean * len(rows) / 6 for mean, rows in zip(means, cut, strict=True))
    loss, weights = stepped(make_engine, batch, plan)
    assert loss == pytest.approx(expected, rel=1e-6)
    exact_loss, exact_weights = stepped(make_engine, batch, replace(plan, classic=False))
    assert abs(loss - exact_loss) > 1e-2
    assert (weights - exact_weights).abs().max() > 1e-3


def test_rows_of_one_length_give_the_exact_mean(make_engine: Make, batch: DataProto) -> None:
    even = batch.select_idxs([0, 0, 5, 5])  # six and four tokens
    even.batch["response_mask"] = even.batch["response_mask"].clone()
    even.batch["response_mask"][:, 4:] = 0
    loss, weights = stepped(make_engine, even, CLASSIC)
    exact_loss, exact_weights = stepped(make_engine, even, EXACT)
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    torch.testing.assert_close(weights, exact_weights, rtol=0, atol=1e-5)
