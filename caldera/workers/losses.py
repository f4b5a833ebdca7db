"""What the engine minimises: the policy's and the critic's loss of one micro-batch."""

from __future__ import annotations

from caldera.config import ActorConfig, CriticConfig
from caldera.core_algos import LossScale, compute_value_loss, get_policy_loss_fn, kl_penalty
from caldera.engine import LossAndMetrics, LossFn, Outputs
from caldera.protocol import DataProto, tensors_of


def policy_loss(config: ActorConfig, on_policy: bool) -> LossFn:
    """Policy loss, minus the entropy bonus, plus the KL to the reference.

    `on_policy` says that the weights are still those that the advantages belong to: the ratio is
    then exactly 1, whatever rounding separates two forward passes.
    """
    policy_loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        tensors = tensors_of(rows)
        mask = tensors["response_mask"]  # (B, R)
        log_prob = outputs["log_probs"]
        old_log_prob = log_prob.detach() if on_policy else tensors["old_log_probs"]
        loss, metrics = policy_loss_fn(
            old_log_prob, log_prob, tensors["advantages"], mask, config.loss_agg_mode, config,
            scale=scale,
        )  # fmt: skip
        metrics = {**metrics, "actor/pg_loss": loss.detach()}
        if "entropy" in outputs:
            entropy = scale.aggregate(
                outputs["entropy"], mask, config.loss_agg_mode, config.loss_scale_factor
            )
            metrics["actor/entropy_loss"] = entropy.detach()
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            distance = kl_penalty(log_prob, tensors["ref_log_prob"], config.kl_loss_type)
            kl_loss = scale.aggregate(
                distance, mask, config.loss_agg_mode, config.loss_scale_factor
            )
            metrics["actor/kl_loss"] = kl_loss.detach()
            loss = loss + config.kl_loss_coef * kl_loss
        return loss, metrics

    return loss_fn


def value_loss(config: CriticConfig) -> LossFn:
    """Clipped squared error of the values against the returns."""

    def loss_fn(outputs: Outputs, rows: DataProto, scale: LossScale) -> LossAndMetrics:
        tensors = tensors_of(rows)
        mask = tensors["response_mask"]
        loss, clipfrac = compute_value_loss(
            outputs["values"], tensors["returns"], tensors["values"], mask,
            config.cliprange_value, config.loss_agg_mode, scale=scale,
        )  # fmt: skip
        metrics = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": clipfrac,
            "critic/vpred_mean": scale.token_mean(outputs["values"], mask),
        }
        return loss, metrics

    return loss_fn
