"""The head's Triton kernels, against log_softmax over all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from caldera.models import head
from caldera.models.head import HeadOutput, full_kl, head_outputs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAMES = ("log_probs", "entropy", "sum_pi_squared")
QWEN = 151_936
# Rows, hidden size, vocabulary: whole tiles and not, one chunk and several.
SIZES = [(256, 64, 8192), (300, 65, 4097), (129, 48, 50_257), (7, 3, 50)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CUDA_BYTES_PER_CHUNK", 1)  # the fewest rows: 128


def inputs(
    rows: int, width: int, vocabulary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits have a deviation of 3."""
    generator = torch.Generator(CUDA).manual_seed(rows)
    hidden = torch.randn(rows, width, device=CUDA, generator=generator)
    weight = 3 * torch.randn(vocabulary, width, device=CUDA, generator=generator) / width**0.5
    labels = torch.randint(vocabulary, (rows,), device=CUDA, generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plainly(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
) -> dict[str, Tensor]:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_p = ((hidden @ weight.t()).to(dtype) / temperature).log_softmax(-1)
    return {
        "log_probs": log_p.gather(1, labels[:, None]).squeeze(1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "sum_pi_squared": log_p.exp().square().sum(-1).detach(),
    }


def loss_of(found: Mapping[Any, Tensor]) -> Tensor:
    log_probs = found["log_probs"]
    upstream = torch.linspace(-1, 2, len(log_probs), dtype=log_probs.dtype, device=CUDA)
    return (upstream * log_probs).sum() + 0.3 * (upstream.flip(0) * found["entropy"]).sum()


def everything(compute: Callable[[], Mapping[Any, Tensor]], *leaves: Tensor) -> dict[str, Tensor]:
    """What `compute` finds, and the gradients of hidden states and head."""
    found = compute()
    grads = torch.autograd.grad(loss_of(found), leaves)
    return {**found, **dict(zip(("hidden", "weight"), grads, strict=False))}


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(
    size: tuple[int, int, int], dtype: torch.dtype, temperature: float
) -> None:
    hidden, weight, labels = inputs(*size, dtype)
    ours = everything(
        lambda: head_outputs(hidden, weight, labels, temperature, NAMES), hidden, weight
    )
    plain = everything(lambda: plainly(hidden, weight, labels, temperature), hidden, weight)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = everything(lambda: plainly(wide[0], wide[1], labels, temperature), *wide)
    for name, value in exact.items():
        assert ours[name].dtype == plain[name].dtype, name
        # No worse than the plain form, to which half precision does the same.
        assert error(ours[name], value) < 2 * error(plain[name], value) + 1e-6, name


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", NAMES[:2])
def test_one_of_the_outputs(name: HeadOutput) -> None:
    hidden, weight, labels = inputs(300, 65, 4097, torch.float32)
    found = head_outputs(hidden, weight, labels, 0.7, [name])
    assert list(found) == [name]
    results = (found[name], plainly(hidden, weight, labels, 0.7)[name])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    # A sum's gradient is one number, seen as many.
    grads = [torch.autograd.grad(x.sum(), [hidden, weight]) for x in results]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_one(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(5, 8, 1, dtype)
    found = everything(lambda: head_outputs(hidden, weight, labels, 0.7, NAMES), hidden, weight)
    assert found["log_probs"].tolist() == found["entropy"].tolist() == [0.0] * 5
    assert found["sum_pi_squared"].tolist() == [1.0] * 5
    for name in ("hidden", "weight"):
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]), rtol=0, atol=1e-5)


def test_a_real_vocabulary() -> None:
    hidden, weight, labels = inputs(5000, 128, QWEN, torch.bfloat16)  # two chunks
    ours = everything(lambda: head_outputs(hidden, weight, labels, 1.0, NAMES), hidden, weight)
    plain = everything(lambda: plainly(hidden, weight, labels, 1.0), hidden, weight)
    for name, value in plain.items():
        assert error(ours[name], value.double()) < 0.01, name
    for name in NAMES:
        torch.testing.assert_close(ours[name].mean(), plain[name].mean(), rtol=1e-4, atol=1e-5)


def peak(compute: Callable[[], object]) -> int:
    """Bytes above those in use."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory() -> None:
    hidden, weight, labels = inputs(8192, 128, QWEN, torch.bfloat16)

    def step(compute: Callable[..., Mapping[Any, Tensor]], *names: object) -> None:
        torch.autograd.grad(loss_of(compute(hidden, weight, labels, 1.0, *names)), [hidden, weight])

    ours, full = peak(lambda: step(head_outputs, NAMES)), peak(lambda: step(plainly))
    # The chunk, the head's gradient in float32 and in its own dtype, and work space of products.
    assert ours < 2**30 + 6 * weight.numel() + 2**28
    assert ours < full / 10


def test_a_frozen_head_costs_nothing() -> None:
    hidden, weight, labels = inputs(256, 512, QWEN, torch.bfloat16)
    frozen = weight.detach()
    grads: list[Tensor] = []

    def step() -> None:
        loss = loss_of(head_outputs(hidden, frozen, labels, 1.0, NAMES))
        grads.extend(torch.autograd.grad(loss, hidden))

    logits = hidden.shape[0] * QWEN * hidden.element_size()
    assert peak(step) < logits + 2 * weight.numel()
    expected = everything(lambda: plainly(hidden, weight, labels, 1.0), hidden)["hidden"]
    assert error(grads[0], expected.double()) < 0.01


def test_the_gradient_of_a_float32_head_is_not_rounded() -> None:
    hidden, weight, labels = inputs(512, 64, 8192, torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    ours = everything(lambda: head_outputs(half, weight, labels, 1.0, NAMES), half, weight)
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in (hidden, weight)]
    exact = everything(lambda: plainly(wide[0], wide[1], labels, 1.0), *wide)["weight"]
    assert ours["weight"].dtype == torch.float32
    assert not torch.equal(ours["weight"], ours["weight"].bfloat16().float())
    assert error(ours["weight"], exact) < 0.01


def test_more_logits_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CUDA_BYTES_PER_CHUNK", 6 * 2**30)
    hidden, weight, labels = inputs(16_384, 16, QWEN, torch.bfloat16)
    assert hidden.shape[0] * QWEN > 2**31
    ours = everything(lambda: head_outputs(hidden, weight, labels, 1.0, NAMES), hidden)
    for part in (slice(0, 64), slice(-64, None)):
        for name, value in plainly(hidden[part], weight, labels[part], 1.0).items():
            assert error(ours[name][part], value.double()) < 0.01, (name, part)
    # The rows' gradients do not depend on one another.
    monkeypatch.setattr(head, "CUDA_BYTES_PER_CHUNK", 2**30)
    chunked = everything(lambda: head_outputs(hidden, weight, labels, 1.0, NAMES), hidden)
    assert error(ours["hidden"], chunked["hidden"].double()) < 0.01


def test_no_rows() -> None:
    hidden, weight, labels = inputs(4, 8, 50, torch.bfloat16)
    found = head_outputs(hidden[:0], weight, labels[:0], 1.0, NAMES)
    assert all(value.shape == (0,) for value in found.values())
    loss_of(found).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_inputs_with_gaps() -> None:
    hidden, weight, labels = inputs(256, 64, 4097, torch.float32)
    found = everything(
        lambda: head_outputs(hidden[::2], weight, labels[::2], 1.0, NAMES), hidden, weight
    )
    copies = hidden[::2].contiguous(), weight, labels[::2].contiguous()
    expected = everything(lambda: head_outputs(*copies, 1.0, NAMES), hidden, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_autocast_no_grad_and_checkpoints_change_nothing() -> None:
    hidden, weight, labels = inputs(256, 64, 4097, torch.float32)

    def run() -> Mapping[Any, Tensor]:
        return head_outputs(hidden, weight, labels, 0.7, NAMES)

    expected = everything(run, hidden, weight)
    with torch.autocast("cuda", torch.bfloat16):
        under_autocast = everything(run, hidden, weight)
    kept = everything(lambda: checkpoint(run, use_reentrant=False), hidden, weight)
    with torch.no_grad():
        without_gradient = run()
    for found in (under_autocast, kept, without_gradient):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """To call after a warm-up: from then on it is an error to wait for the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu(no_waiting: Callable[[], None]) -> None:
    hidden, weight, labels = inputs(300, 64, 4097, torch.bfloat16)

    def step() -> None:
        found = head_outputs(hidden, weight, labels, 0.7, NAMES)
        divergence = full_kl(hidden, weight, hidden.detach() * 0.9, weight, 0.7)
        torch.autograd.grad(loss_of(found) + divergence.sum(), [hidden, weight])
        with torch.no_grad():
            head_outputs(hidden, weight, labels, 0.7, NAMES[:1])

    step()
    no_waiting()
    step()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_kl(dtype: torch.dtype) -> None:
    hidden, weight, _ = inputs(300, 64, 4097, dtype)
    ref_hidden, ref_weight = hidden.detach() * 0.9, weight.detach()
    divergence = full_kl(hidden, weight, ref_hidden, ref_weight, 0.7)
    log_p = ((hidden @ weight.t()).float() / 0.7).log_softmax(-1)
    log_q = ((ref_hidden @ ref_weight.t()).float() / 0.7).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    assert error(divergence, expected.double()) < bound
    grads = [torch.autograd.grad(x.sum(), [hidden, weight]) for x in (divergence, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert error(ours, theirs.double()) < bound
