"""What the engines are to compute in each phase, as the config says."""

from __future__ import annotations

from caldera.config import ActorRolloutRefConfig, RefConfig, RolloutConfig
from caldera.engine import Engine, ForwardPlan, OutputName


def update_plan(config: ActorRolloutRefConfig, reference: Engine | None) -> ForwardPlan:
    """For training the actor; `reference` is used where the loss needs the full KL to it."""
    actor = config.actor
    outputs: list[OutputName] = ["log_probs"]
    if actor.entropy_coeff != 0 or actor.calculate_entropy:
        outputs.append("entropy")
    if full_kl := actor.use_kl_loss and actor.kl_loss_type == "full":
        outputs.append("full_kl")
    return ForwardPlan(
        tuple(outputs), actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu,
        actor.ppo_max_token_len_per_gpu, config.rollout.temperature,
        reference if full_kl else None, actor.classic_loss_normalization,
    )  # fmt: skip


def log_prob_plan(
    config: RolloutConfig | RefConfig,
    outputs: tuple[OutputName, ...],
    temperature: float,
    reference: Engine | None,
) -> ForwardPlan:
    """For log-probs and their like, without training."""
    return ForwardPlan(
        outputs, config.log_prob_use_dynamic_bsz, config.log_prob_micro_batch_size_per_gpu,
        config.log_prob_max_token_len_per_gpu, temperature,
        reference if "full_kl" in outputs else None,
    )  # fmt: skip
