"""Which models a run needs."""

from __future__ import annotations

from caldera.config.ppo import PPOTrainerConfig


def needs_critic(config: PPOTrainerConfig) -> bool:
    """A critic is trained."""
    if config.critic.enable is not None:
        return config.critic.enable
    return config.algorithm.adv_estimator == "gae"


def needs_reference(config: PPOTrainerConfig) -> bool:
    """Log-probs of the reference are needed."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
