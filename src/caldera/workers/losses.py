"""What the engine minimises: the policy's and the critic's loss of one micro-batch."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from caldera.config import ActorConfig, CriticConfig
from caldera.core_algos import (
    POLICY_LOSSES,
    LossScale,
    call_policy_loss,
    compute_value_loss,
    kl_penalty,
)
from caldera.data import registered_or_own
from caldera.engine import LossAndMetrics, LossFn, Outputs
from caldera.protocol import DataProto, tensors_of


def policy_loss(config: ActorConfig, on_policy: bool) -> LossFn:
    """Policy loss, minus the entropy bonus, plus the KL to the reference.

    `on_policy` says that the weights are still those that the advantages belong to: the ratio is
    then exactly 1, whatever rounding separates two forward passes. Not so in bypass mode, whose
    old log-probs are the sampler's.
    """
    policy_loss_fn = registered_or_own(POLICY_LOSSES, config.policy_loss.loss_mode)
    on_policy = on_policy and config.policy_loss.loss_mode != "bypass_mode"

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        tensors = tensors_of(rows)
        mask = tensors["response_mask"]  # (B, R)
        log_prob = outputs["log_probs"]
        old_log_prob = log_prob.detach() if on_policy else tensors["old_log_probs"]
        loss, metrics = call_policy_loss(
            policy_loss_fn,
            old_log_prob,
            log_prob,
            tensors["advantages"],
            mask,
            config.loss_agg_mode,
            config,
            tensors.get("rollout_is_weights", None),
            scale,
        )
        metrics = {**metrics, "actor/pg_loss": loss.detach()}
        terms = {}  # name: (value of each token, coefficient)
        if "entropy" in outputs:
            terms["actor/entropy_loss"] = (outputs["entropy"], -config.entropy_coeff)
        if config.use_kl_loss:
            terms["actor/kl_loss"] = (_kl_loss(config, outputs, tensors), config.kl_loss_coef)
        for name, (values, coefficient) in terms.items():
            term = scale.aggregate(values, mask, config.loss_agg_mode, config.loss_scale_factor)
            metrics[name] = term.detach()
            loss = loss + coefficient * term
        return loss, metrics

    return loss_fn


def _kl_loss(config: ActorConfig, outputs: Outputs, tensors: TensorDict) -> Tensor:
    """The KL to the reference at each token, (B, R)."""
    if config.kl_loss_type == "full":
        return outputs["full_kl"]
    return kl_penalty(outputs["log_probs"], tensors["ref_log_prob"], config.kl_loss_type)


def value_loss(config: CriticConfig) -> LossFn:
    """Clipped squared error of the values against the returns."""

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        tensors = tensors_of(rows)
        mask = tensors["response_mask"]
        loss, clipfrac = compute_value_loss(
            outputs["values"],
            tensors["returns"],
            tensors["values"],
            mask,
            config.cliprange_value,
            config.loss_agg_mode,
            scale=scale,
        )
        metrics = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": clipfrac,
            "critic/vpred_mean": scale.token_mean(outputs["values"], mask),
        }
        return loss, metrics

    return loss_fn
