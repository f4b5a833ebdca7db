"""Whether this thread computes exactly, and the norms of `exact` on CUDA, one kernel each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

_state = threading.local()


def in_exactness() -> bool:
    return getattr(_state, "active", False)


def set_exactness(active: bool) -> None:
    _state.active = active


def fuse_norms(module: nn.Module) -> None:
    """Let every norm of the module that is known here run as one kernel, in exactness on CUDA.

    The trainer that runs the module has the same norms, so that sampler and trainer still agree.
    """
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm") and "forward" not in part.__dict__:
            shifted = kind_of(part)
            if shifted is not None:
                part.forward = partial(_forward, part, shifted)


def _forward(part: nn.Module, shifted: bool, values: Tensor) -> Tensor:
    if not (in_exactness() and values.is_cuda):
        return cast(Tensor, type(part).forward(part, values))
    from caldera.models.exact_cuda import rms_norm as fused  # Triton comes with CUDA alone

    options: Any = {"epsilon": epsilon_of(part), "shifted": shifted}
    return with_plain_gradient(
        partial(fused, **options), partial(rms_norm, **options), values, cast(Tensor, part.weight)
    )


def epsilon_of(part: nn.Module) -> float:
    return float(getattr(part, "variance_epsilon", None) or part.eps)  # type: ignore[arg-type]


def kind_of(part: nn.Module) -> bool | None:
    """Whether the weight is an offset from one; None if the norm is of neither kind."""
    weight = getattr(part, "weight", None)
    has_epsilon = hasattr(part, "variance_epsilon") or hasattr(part, "eps")
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not has_epsilon or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, len(weight), generator=generator).to(weight)
    with torch.no_grad():
        want = part(values)
        for shifted in (False, True):
            if torch.equal(rms_norm(values, weight, epsilon_of(part), shifted), want):
                return shifted
    return None


def rms_norm(values: Tensor, weight: Tensor, epsilon: float, shifted: bool) -> Tensor:
    """As transformers computes it; values (..., K), weight (K,).

    Most models multiply by the weight after rounding; `shifted` ones by one plus it, before that.
    """
    normed = values.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + epsilon)
    if shifted:
        return (normed * (1.0 + weight.float())).type_as(values)
    return weight * normed.to(values.dtype)


# ---- Gradients of what is computed exactly: those of the ordinary kernels


def with_plain_gradient(
    exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor
) -> Tensor:
    """`exact` of the inputs, whose gradients are those of `plain`."""
    found: Tensor = _WithPlainGradient.apply(exact, plain, *inputs)  # type: ignore[no-untyped-call]
    return found


class _WithPlainGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.plain = plain
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            of_inputs = torch.autograd.grad(ctx.plain(*inputs), inputs, grads[0])
        return None, None, *of_inputs
