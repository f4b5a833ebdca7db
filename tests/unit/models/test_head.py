"""The chunked head, against log_softmax over all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.models import head
from caldera.models.head import log_prob_and_entropy

ROWS, VOCABULARY, WIDTH = 7, 11, 5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (ROWS,), generator=generator)


def plainly(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> list[Tensor]:
    log_p = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    return [log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]


@pytest.fixture(params=[1, 3 * VOCABULARY, 2**24], ids=["1 row", "3 rows", "all rows"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CELLS_PER_CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(temperature: float) -> None:
    hidden, weight, labels = inputs()
    ours = log_prob_and_entropy(hidden, weight, labels, temperature, with_entropy=True)
    theirs = plainly(hidden, weight, labels, temperature)
    # Each on its own, then both at once.
    for factors in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):
        upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
        grads = [
            torch.autograd.grad(
                sum((f * upstream * x).sum() for f, x in zip(factors, results, strict=True)),
                [hidden, weight],
                retain_graph=True,
            )
            for results in (ours, theirs)
        ]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(ours), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunk")
def test_without_entropy() -> None:
    hidden, weight, labels = inputs()
    log_prob, entropy = log_prob_and_entropy(hidden, weight, labels, 0.7, with_entropy=False)
    assert entropy.tolist() == [0.0] * ROWS
    expected = plainly(hidden, weight, labels, 0.7)[0]
    grads = [torch.autograd.grad(x.sum(), [hidden, weight]) for x in (log_prob, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen: str) -> None:
    tensors = dict(zip(("hidden", "weight", "labels"), inputs(), strict=True))
    other = next(tensors[name] for name in ("hidden", "weight") if name != frozen)
    tensors[frozen] = tensors[frozen].detach()
    log_prob, _ = log_prob_and_entropy(**tensors, temperature=1.0, with_entropy=True)
    expected = plainly(**tensors, temperature=1.0)[0]
    grads = [torch.autograd.grad(x.sum(), other)[0] for x in (log_prob, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    hidden, weight, labels = inputs()
    log_prob, entropy = log_prob_and_entropy(hidden[:0], weight, labels[:0], 1.0, True)
    assert log_prob.shape == entropy.shape == (0,)
    log_prob.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_half_precision_gives_float32_results() -> None:
    hidden, weight, labels = inputs(torch.float32)
    log_prob, entropy = log_prob_and_entropy(hidden.bfloat16(), weight, labels, 1.0, True)
    assert log_prob.dtype == entropy.dtype == torch.float32
    expected = plainly(hidden.bfloat16().float(), weight.bfloat16().float(), labels, 1.0)
    torch.testing.assert_close([log_prob, entropy], expected, rtol=0.02, atol=0.02)
    log_prob.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_logits_far_apart_stay_finite() -> None:
    hidden, weight, labels = inputs(torch.float32)
    log_prob, entropy = log_prob_and_entropy(1e4 * hidden, weight, labels, 1.0, True)
    grads: Any = torch.autograd.grad((log_prob + entropy).sum(), [hidden, weight])
    for tensor in (log_prob, entropy, *grads):
        assert torch.isfinite(tensor).all()
