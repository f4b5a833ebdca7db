"""The head's Triton kernels in Triton's interpreter, against the same operations in PyTorch.

tests/gpu has the tests on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caldera.models import head, triton_head

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TILE = triton_head.DEPTH * triton_head.LANES
# One tile and none left over, a few left over, less than a lane for each, one logit only.
VOCABULARIES = [TILE, 2 * TILE + 17, 33, 1]
ROWS = 3


def chunk(vocabulary: int, dtype: torch.dtype, size: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits (n, V) and labels (n,). Between the rows lies what must not be read into a result."""
    generator = torch.Generator().manual_seed(vocabulary)
    width = -(-vocabulary // 16) * 16
    logits = torch.full((ROWS, width), torch.nan, dtype=dtype)[:, :vocabulary]
    logits.copy_(size * torch.randn(ROWS, vocabulary, generator=generator))
    return logits, torch.randint(vocabulary, (ROWS,), generator=generator)


def outputs(dtype: torch.dtype) -> list[Tensor]:
    """log_probs, normaliser, entropy and squares, still to be written."""
    return [torch.full((ROWS,), torch.nan, dtype=dtype) for _ in range(4)]


def precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_forward(vocabulary: int, dtype: torch.dtype) -> None:
    logits, labels = chunk(vocabulary, dtype)
    found, expected = outputs(precise(dtype)), outputs(torch.float64)
    triton_head.rows_forward(logits, labels, 0.7, *found)
    head.rows_forward(logits.double(), labels, 0.7, *expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=2e-6)


def test_forward_without_what_nobody_asked_for() -> None:
    logits, labels = chunk(TILE + 5, torch.float32)
    every, two = outputs(torch.float32), outputs(torch.float32)
    triton_head.rows_forward(logits, labels, 0.7, *every)
    triton_head.rows_forward(logits, labels, 0.7, two[0], two[1], None, None)
    torch.testing.assert_close(two[:2], every[:2], rtol=0.0, atol=0.0)
    assert torch.stack(two[2:]).isnan().all()


def test_forward_of_logits_far_apart() -> None:
    logits, labels = chunk(TILE + 5, torch.float32, size=1e4)
    logits[:, 7] = 1e6
    labels[0] = 7
    log_probs, _, entropy, squares = found = outputs(torch.float32)
    triton_head.rows_forward(logits, labels, 1.0, *found)
    assert log_probs[0] == 0.0
    assert log_probs.isfinite().all()
    assert entropy.tolist() == [0.0] * ROWS
    assert squares.tolist() == [1.0] * ROWS


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_backward(vocabulary: int, dtype: torch.dtype, with_entropy: bool) -> None:
    logits, labels = chunk(vocabulary, dtype)
    said = outputs(precise(dtype))
    head.rows_forward(logits, labels, 0.7, *said)
    normaliser, entropy = said[1], said[2] if with_entropy else None
    upstream = torch.linspace(-1, 2, ROWS, dtype=precise(dtype))
    through_entropy = upstream.flip(0) if with_entropy else None
    arguments = (labels, 0.7, normaliser, entropy, upstream, through_entropy)
    expected = head.rows_backward(logits, *arguments)
    found = triton_head.rows_backward(logits, *arguments)
    assert found is logits
    rtol = max(2 * torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


# Between the rows lies what nobody reads: the backward kernel computes with it all the same.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_head(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 12, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 12, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(50, (7,), generator=generator)
    monkeypatch.setattr(head, "CELLS_PER_CHUNK", 3 * 50)
    results = []
    for module in (head, triton_head):
        operations = (module.rows_forward, module.rows_backward)
        monkeypatch.setattr(head, "row_operations", lambda _, operations=operations: operations)
        found = head.head_outputs(hidden, weight, labels, 0.7, ["log_probs", "entropy"])
        loss = found["log_probs"].mean() - 0.1 * found["entropy"].sum()
        results.append([*found.values(), *torch.autograd.grad(loss, [hidden, weight])])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
