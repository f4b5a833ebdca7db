"""The contract that all policy losses share, their registry and a few terms.

A registered loss is called as

    f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
      rollout_is_weights=None, scale=None) -> (loss, metrics)

on (B, R) tensors, with `config` the ActorConfig. `scale` holds the counts of the whole mini-batch
when the tensors are one micro-batch of it; the loss and every metric are then this micro-batch's
share, and the shares add up to the exact value of the mini-batch (sum over micro-batches, mean
over ranks). Without `scale` the tensors are the whole. `rollout_is_weights` multiply the losses of
the tokens. Metrics are detached scalar tensors, left on their device so that nothing waits for it
here. What lies outside the mask is never read: it may be NaN.

A loss may leave out `scale`, as losses written for verl do: see `call_policy_loss`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale, zero_outside
from caldera.registry import Registry

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
PolicyLossFn = Callable[..., LossAndMetrics]

POLICY_LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")

MAX_LOG_RATIO = 20.0  # e^20 is finite in every dtype but float16


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorate a loss to make it a value of `actor_rollout_ref.actor.policy_loss.loss_mode`."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    return POLICY_LOSSES[name]


def call_policy_loss(
    name_or_fn: str | PolicyLossFn,
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Call a loss, by name or itself, whether it takes `scale` or not.

    One that does not (verl's signature) returns means over the micro-batch. Its loss and metrics
    are weighed by the micro-batch's part of the mini-batch's tokens, so that they can be added up.
    This is exact for means over tokens; other aggregations then depend on the micro-batches.
    """
    fn = get_policy_loss_fn(name_or_fn) if isinstance(name_or_fn, str) else name_or_fn
    knows_scale = _takes_scale(fn)
    loss, metrics = fn(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
        **({"scale": scale} if knows_scale else {}),
    )
    if knows_scale:
        return loss, metrics
    scale = scale or LossScale.from_mask(response_mask)
    share = scale.share_of_mean(loss, response_mask)
    return share, shares_of_means(metrics, response_mask, scale, like=loss)


def _takes_scale(fn: PolicyLossFn) -> bool:
    parameters = inspect.signature(fn).parameters
    return "scale" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def shares_of_means(
    metrics: Mapping[str, Tensor | float], response_mask: Tensor, scale: LossScale, like: Tensor
) -> dict[str, Tensor]:
    """Metrics that were computed of one micro-batch, as its shares of their mean, token-weighted,
    over the micro-batches of a mini-batch; of the dtype and on the device of `like`."""
    return {
        name: scale.share_of_mean(
            torch.as_tensor(value, dtype=like.dtype, device=like.device).detach(), response_mask
        )
        for name, value in metrics.items()
    }


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss is called with, and the terms that losses make of it."""

    old_log_prob: Tensor  # (B, R), as are all tensors here
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: ActorConfig
    rollout_is_weights: Tensor | None = None
    scale: LossScale | None = None

    @property
    def counts(self) -> LossScale:
        """Those of the whole mini-batch."""
        return self.scale or LossScale.from_mask(self.response_mask)

    def log_ratio(self) -> Tensor:
        """log(new probability / old probability) of each token, 0 outside the mask."""
        return zero_outside(self.log_prob - self.old_log_prob, self.response_mask)

    def kept_log_prob(self) -> Tensor:
        """`log_prob`, 0 outside the mask."""
        return zero_outside(self.log_prob, self.response_mask)

    def weighted(self, losses: Tensor) -> Tensor:
        return losses if self.rollout_is_weights is None else losses * self.rollout_is_weights

    def aggregate(self, losses: Tensor, mode: str | None = None) -> Tensor:
        """The loss, of the losses of tokens without their weights."""
        mode = mode or self.loss_agg_mode
        factor = self.config.loss_scale_factor
        return self.counts.aggregate(self.weighted(losses), self.response_mask, mode, factor)

    def metrics(
        self, kl: Tensor, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The metrics that losses have in common, as means over tokens.

        Losses without such a bound report 0 clipped tokens.
        """
        nowhere = torch.zeros_like(kl)
        per_token = {
            "actor/pg_clipfrac": nowhere if clipped is None else clipped.to(kl.dtype),
            "actor/ppo_kl": kl,
            "actor/pg_clipfrac_lower": nowhere
            if clipped_lower is None
            else clipped_lower.to(kl.dtype),
        }
        return {
            name: self.counts.token_mean(values, self.response_mask)
            for name, values in per_token.items()
        }


def policy_loss(name: str) -> Callable[[Callable[[LossInputs], LossAndMetrics]], PolicyLossFn]:
    """Register a loss that is written as a function of its inputs; it is called as all are."""

    def registered(compute: Callable[[LossInputs], LossAndMetrics]) -> PolicyLossFn:
        def loss_fn(*args: Any, **kwargs: Any) -> LossAndMetrics:
            return compute(LossInputs(*args, **kwargs))

        update_wrapper(loss_fn, compute)
        del loss_fn.__wrapped__  # type: ignore[attr-defined]  # the signature is its own
        return register_policy_loss(name)(loss_fn)

    return registered


def bounded_exp(exponent: Tensor) -> Tensor:
    """e^x, with x kept within +-20 so that neither the value nor its gradient overflows."""
    return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio may go."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        config.clip_ratio if low is None else low,
        config.clip_ratio if high is None else high,
    )


def clipped_objective(
    ratio: Tensor, advantages: Tensor, config: ActorConfig
) -> tuple[Tensor, Tensor]:
    """PPO's loss of each token, the worse of the plain and the clipped one; and where it is the
    clipped one."""
    low, high = clip_range(config)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), clipped > plain
