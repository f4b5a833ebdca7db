"""Losses of pairs of responses, of which one was preferred.

All tensors are (n,), one value a pair. Nothing is averaged here: a pair's loss and metrics do not
depend on the pairs around it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from caldera.config.preference import DPO_LOSSES
from caldera.errors import ConfigError

PairMetrics = dict[str, Tensor]
"""Detached; `accuracy` is 1 where the chosen response is rated higher, 1/2 where both are alike."""


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None
) -> tuple[Tensor, PairMetrics]:
    """Minus the log-probability that a judge with these scores prefers the chosen response.

    With `margin`, the judge is handicapped: the chosen score has to be so much higher to count as
    equal.
    """
    difference = chosen - rejected
    losses = -logsigmoid(difference if margin is None else difference - margin)
    metrics = _rated(chosen, rejected)
    return losses, {**metrics, "chosen_score": chosen.detach(), "rejected_score": rejected.detach()}


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference: tuple[Tensor, Tensor] | None,
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
) -> tuple[Tensor, PairMetrics]:
    """Direct preference optimisation, of log-probabilities of whole responses.

    `reference` are the reference's, of the chosen and of the rejected responses; None is one that
    finds all responses alike. A response's reward is `beta` times its log-ratio, the policy's
    log-probability less the reference's. `sigmoid` is the Bradley-Terry loss of these rewards, with
    a share of `label_smoothing` for the opposite preference; `hinge` asks for rewards that are 1
    apart; `ipo` pulls log-ratios to a distance of 1 / (2 beta).
    """
    ratio_chosen, ratio_rejected = chosen, rejected
    if reference is not None:
        ratio_chosen, ratio_rejected = chosen - reference[0], rejected - reference[1]
    difference = ratio_chosen - ratio_rejected
    if loss_type == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(beta * difference)
        losses = losses - label_smoothing * logsigmoid(-beta * difference)
    elif loss_type == "hinge":
        losses = torch.relu(1 - beta * difference)
    elif loss_type == "ipo":
        losses = (difference - 1 / (2 * beta)).square()
    else:
        raise ConfigError(f"loss_type={loss_type!r} is not one of: {', '.join(DPO_LOSSES)}")
    metrics = _rated(beta * ratio_chosen, beta * ratio_rejected)
    return losses, {
        **metrics,
        "chosen_reward": beta * ratio_chosen.detach(),
        "rejected_reward": beta * ratio_rejected.detach(),
        "chosen_log_prob": chosen.detach(),
        "rejected_log_prob": rejected.detach(),
    }


def _rated(chosen: Tensor, rejected: Tensor) -> PairMetrics:
    difference = (chosen - rejected).detach()
    accuracy = (difference.sign() + 1) / 2
    return {"accuracy": accuracy, "margin": difference}
