"""The chunked head, against log_softmax over all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from caldera.models import head
from caldera.models.head import full_kl, head_outputs

ROWS, VOCABULARY, WIDTH = 7, 11, 5
BOTH = ("log_probs", "entropy")


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
    found = head_outputs(hidden, weight, labels, temperature, BOTH)
    assert tuple(found) == BOTH
    ours = list(found.values())
    theirs = plainly(hidden, weight, labels, temperature)
    # Each on its own, then both at once.
    for factors in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):
        upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
        grads = [
            torch.autograd.grad(
                sum(
                    ((f * upstream * x).sum() for f, x in zip(factors, results, strict=True)),
                    torch.zeros(()),
                ),
                [hidden, weight],
                retain_graph=True,
            )
            for results in (ours, theirs)
        ]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("name", BOTH)
def test_one_of_both(name: str) -> None:
    hidden, weight, labels = inputs()
    found = head_outputs(hidden, weight, labels, 0.7, [name])
    assert list(found) == [name]
    expected = plainly(hidden, weight, labels, 0.7)[BOTH.index(name)]
    results = (*found.values(), expected)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(x.sum(), [hidden, weight]) for x in results]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunk")
def test_sum_of_squared_probabilities() -> None:
    hidden, weight, labels = inputs()
    found = head_outputs(hidden, weight, labels, 0.7, ["log_probs", "sum_pi_squared"])
    squares = found["sum_pi_squared"]
    expected = ((hidden @ weight.t()) / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(squares, expected.detach(), rtol=1e-12, atol=0.0)
    assert not squares.requires_grad
    grads = [
        torch.autograd.grad(x.sum(), [hidden, weight])
        for x in (found["log_probs"], plainly(hidden, weight, labels, 0.7)[0])
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def test_nothing_is_asked_for() -> None:
    assert head_outputs(*inputs(), 1.0, ["full_kl"]) == {}


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen: str) -> None:
    tensors = dict(zip(("hidden", "weight", "labels"), inputs(), strict=True))
    other = next(tensors[name] for name in ("hidden", "weight") if name != frozen)
    tensors[frozen] = tensors[frozen].detach()
    hidden, weight, labels = tensors.values()
    log_prob = head_outputs(hidden, weight, labels, 1.0, BOTH)["log_probs"]
    expected = plainly(**tensors, temperature=1.0)[0]
    grads = [torch.autograd.grad(x.sum(), other)[0] for x in (log_prob, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    hidden, weight, labels = inputs()
    log_prob, entropy = head_outputs(hidden[:0], weight, labels[:0], 1.0, BOTH).values()
    assert log_prob.shape == entropy.shape == (0,)
    log_prob.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_half_precision_gives_float32_results() -> None:
    hidden, weight, labels = inputs(torch.float32)
    log_prob, entropy = head_outputs(hidden.bfloat16(), weight, labels, 1.0, BOTH).values()
    assert log_prob.dtype == entropy.dtype == torch.float32
    expected = plainly(hidden.bfloat16().float(), weight.bfloat16().float(), labels, 1.0)
    torch.testing.assert_close([log_prob, entropy], expected, rtol=0.02, atol=0.02)
    log_prob.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_logits_far_apart_stay_finite() -> None:
    hidden, weight, labels = inputs(torch.float32)
    log_prob, entropy = head_outputs(1e4 * hidden, weight, labels, 1.0, BOTH).values()
    grads: Any = torch.autograd.grad((log_prob + entropy).sum(), [hidden, weight])
    for tensor in (log_prob, entropy, *grads):
        assert torch.isfinite(tensor).all()


def gradients(*arguments: Any, autocast: bool = False) -> tuple[Tensor, ...]:
    """Both outputs of the head, and the gradients of hidden states and head through them."""
    hidden, weight, labels, temperature = arguments
    found = tuple(head_outputs(hidden, weight, labels, temperature, BOTH).values())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return *found, *torch.autograd.grad(found, arguments[:2], [torch.ones(ROWS)] * 2)


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_autocast_changes_nothing(inside: str) -> None:
    arguments = (*inputs(torch.float32), 0.7)
    expected = gradients(*arguments)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside == "forward"):
        found = gradients(*arguments, autocast=inside == "backward")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_no_gradient_is_wanted() -> None:
    expected = head_outputs(*inputs(), 0.7, BOTH)
    with torch.no_grad():
        found = head_outputs(*inputs(), 0.7, BOTH)
    assert not any(value.requires_grad for value in found.values())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_under_activation_checkpointing() -> None:
    hidden, weight, labels = inputs()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        found = head_outputs(hidden, weight, labels, 0.7, BOTH)
        return (found["log_probs"] + found["entropy"]).sum()

    kept = checkpoint(loss, hidden, weight, use_reentrant=False)
    grads = [torch.autograd.grad(x, [hidden, weight]) for x in (kept, loss(hidden, weight))]
    torch.testing.assert_close(grads[0], grads[1], rtol=0.0, atol=0.0)


def test_within_a_compiled_function() -> None:
    hidden, weight, labels = inputs()

    def model(hidden: Tensor) -> dict[Any, Tensor]:
        return head_outputs(hidden * 2, weight, labels, 0.7, BOTH)

    found = torch.compile(model, backend="eager")(hidden)
    torch.testing.assert_close(found, model(hidden), rtol=0.0, atol=0.0)


def test_there_is_no_second_derivative() -> None:
    hidden, weight, labels = inputs()
    log_probs = head_outputs(hidden, weight, labels, 1.0, BOTH)["log_probs"]
    (grad,) = torch.autograd.grad(log_probs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_gradient_of_a_float32_head_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CELLS_PER_CHUNK", VOCABULARY)
    hidden, weight, labels = inputs(torch.float32)
    head_outputs(hidden.bfloat16(), weight, labels, 1.0, BOTH)["log_probs"].sum().backward()
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Policy and reference: hidden states and head of each."""
    hidden, weight, _ = inputs(dtype)
    generator = torch.Generator().manual_seed(1)
    ref_hidden = hidden.detach() + 0.3 * torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
    ref_weight = weight.detach() + 0.3 * torch.randn(
        VOCABULARY, WIDTH, generator=generator, dtype=dtype
    )
    return hidden, weight, ref_hidden, ref_weight


def dense_kl(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, temperature: float
) -> Tensor:
    log_p = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    log_q = ((ref_hidden @ ref_weight.t()) / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_full_kl_and_its_gradients(temperature: float) -> None:
    tensors = heads()
    ours, theirs = full_kl(*tensors, temperature), dense_kl(*tensors, temperature)
    assert theirs.min() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    upstream = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    grads = [torch.autograd.grad((upstream * x).sum(), tensors[:2]) for x in (ours, theirs)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("chunk")
def test_full_kl_by_finite_differences() -> None:
    hidden, weight, ref_hidden, ref_weight = heads()
    torch.autograd.gradcheck(
        lambda h, w: full_kl(h, w, ref_hidden, ref_weight, 0.7), (hidden, weight)
    )


def test_full_kl_by_hand() -> None:
    # Probabilities 1/2, 1/2 against 1/4, 3/4.
    hidden, weight = torch.ones(1, 1), torch.zeros(2, 1)
    ref_weight = torch.tensor([[0.0], [3.0]]).log().clamp(min=0.0)
    expected = 0.5 * torch.tensor([2.0, 2 / 3]).log().sum()
    assert full_kl(hidden, weight, hidden, ref_weight, 1.0).item() == pytest.approx(expected.item())


@pytest.mark.usefixtures("chunk")
def test_full_kl_in_float32() -> None:
    hidden, weight, ref_hidden, ref_weight = (leaf.double() for leaf in heads(torch.float32))
    exact = dense_kl(hidden, weight, ref_hidden, ref_weight, 0.7)
    rounded = full_kl(*heads(torch.float32), 0.7)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), exact, rtol=1e-6, atol=5e-7)


def test_full_kl_of_a_policy_to_itself() -> None:
    hidden, weight, *_ = heads(torch.float32)
    divergence = full_kl(hidden, weight, hidden, weight, 0.7)
    assert divergence.tolist() == [0.0] * ROWS
    grads = torch.autograd.grad(divergence.sum(), [hidden, weight])
    assert not any(grad.any() for grad in grads)


def test_the_reference_gets_no_gradient() -> None:
    tensors = [tensor.detach().requires_grad_() for tensor in heads()]
    hidden, weight, ref_hidden, ref_weight = tensors
    full_kl(hidden, weight, ref_hidden, ref_weight, 1.0).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [True, True, False, False]


def test_full_kl_of_a_frozen_head() -> None:
    hidden, weight, ref_hidden, ref_weight = heads()
    frozen = weight.detach()
    grads = [
        torch.autograd.grad(kl(hidden, frozen, ref_hidden, ref_weight, 0.7).sum(), hidden)[0]
        for kl in (full_kl, dense_kl)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-14)


def test_full_kl_in_mixed_precision() -> None:
    hidden, weight, ref_hidden, ref_weight = heads(torch.float32)
    divergence = full_kl(hidden.bfloat16(), weight, ref_hidden, ref_weight, 1.0)
    assert divergence.dtype == torch.float32
    expected = dense_kl(hidden, weight, ref_hidden, ref_weight, 1.0)
    torch.testing.assert_close(divergence, expected, rtol=0.05, atol=0.05)
    divergence.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_full_kl_of_logits_far_apart_stays_finite() -> None:
    hidden, weight, ref_hidden, ref_weight = heads(torch.float32)
    divergence = full_kl(1e4 * hidden, weight, -1e4 * ref_hidden, ref_weight, 1.0)
    grads: Any = torch.autograd.grad(divergence.sum(), [hidden, weight])
    assert all(torch.isfinite(tensor).all() for tensor in (divergence, *grads))


def test_full_kl_of_no_rows() -> None:
    hidden, weight, ref_hidden, ref_weight = heads()
    divergence = full_kl(hidden[:0], weight, ref_hidden[:0], ref_weight, 1.0)
    assert divergence.shape == (0,)
    divergence.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def all_outputs() -> Tensor:
    hidden, weight, labels = inputs()
    found = head_outputs(hidden, weight, labels, 1.0, [*BOTH, "sum_pi_squared"])
    return found["log_probs"] + found["entropy"]


@pytest.mark.parametrize("cells", [6 * VOCABULARY, 2**24], ids=["6 rows", "all rows"])
@pytest.mark.parametrize("compute", [all_outputs, lambda: full_kl(*heads(), 1.0)])
def test_only_a_chunk_of_logits_exists(
    monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Tensor], cells: int
) -> None:
    monkeypatch.setattr(head, "CELLS_PER_CHUNK", cells)
    sizes: list[int] = []
    with _Sizes(sizes):
        compute().sum().backward()
    rows = max(size // VOCABULARY for size in sizes)
    assert rows == min(ROWS, cells // VOCABULARY)


class _Sizes(TorchDispatchMode):
    """Notes the elements of every (rows, vocabulary) tensor that is made."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == VOCABULARY:
            self.sizes.append(out.numel())
        return out
