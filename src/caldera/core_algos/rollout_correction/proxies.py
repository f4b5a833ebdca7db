"""Proxies of the variance of the policy gradient, without a gradient for each trajectory.

The gradient of log pi at a token, with respect to the logits, has the squared norm
w = 1 - 2 pi + sum_v pi_v^2, where pi is the probability of the sampled token. Taking the tokens of
a trajectory as independent, that of the whole trajectory has about W_i = sum_t w_t, or
sum_t rho_t^2 w_t if importance weights rho multiply the loss. With A_i the mean advantage of its
tokens and n trajectories:

    proxy2_total_power      mean_i A_i^2 W_i: the mean squared norm of one trajectory's gradient
    proxy1_signal_strength  squared norm of the mean gradient, which the update measures
    proxy3_pure_noise       (proxy2 - proxy1) / (n - 1), at least 0: the variance of that mean
    expected_a_squared      mean_i A_i^2
    expected_w              mean_i W_i

Signal and noise are comparable only where the gradient is that of the sum over tokens and the mean
over trajectories (seq-mean-token-sum), and only as trends: W is measured at the logits, the norm
of the gradient at the parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.core_algos.masked import masked_mean, masked_sum

__all__ = ["compute_variance_proxies"]


@torch.no_grad()
def compute_variance_proxies(
    advantages: Tensor,  # (B, R), as are all tensors here
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
    grad_norm: Tensor | float | None = None,
) -> dict[str, Tensor]:
    """The proxies under `variance_proxy/`; those of signal and noise only with `grad_norm`, the
    norm of the mean gradient. Detached scalar tensors; trajectories without a token do not count.
    """
    kept = response_mask.bool()
    trajectories = kept.any(-1)  # (B,)
    squared_norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        squared_norms = squared_norms * rollout_is_weights.square()
    w = masked_sum(squared_norms, kept, dim=-1)  # (B,)
    a_squared = masked_mean(advantages, kept, dim=-1).square()

    total_power = masked_mean(a_squared * w, trajectories)
    proxies = {
        "proxy2_total_power": total_power,
        "expected_a_squared": masked_mean(a_squared, trajectories),
        "expected_w": masked_mean(w, trajectories),
    }
    if grad_norm is not None:
        signal = torch.as_tensor(grad_norm, dtype=w.dtype, device=w.device).detach().square()
        others = (trajectories.sum() - 1).clamp(min=1)
        proxies["proxy1_signal_strength"] = signal
        proxies["proxy3_pure_noise"] = ((total_power - signal) / others).clamp(min=0)
    return {f"variance_proxy/{name}": value for name, value in proxies.items()}
