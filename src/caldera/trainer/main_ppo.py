"""`python3 -m caldera.trainer.main_ppo key=value ...`: train with PPO or a relative of it."""

from __future__ import annotations

import sys

from caldera.config import PPOTrainerConfig
from caldera.config.estimators import check_group_size
from caldera.config.validate import check_consistency
from caldera.trainer.entry import ConfigCommand


def check_training(config: PPOTrainerConfig) -> None:
    """Keys fit together, and the estimator can work with `rollout.n`. Estimators of the user's own,
    which no module has registered yet, are not looked at."""
    check_consistency(config)
    check_responses(config)


def check_responses(config: PPOTrainerConfig) -> None:
    """Raise where one response a prompt is sampled for an estimator that compares several."""
    if config.actor_rollout_ref.rollout.n > 1 or config.trainer.val_only:
        return
    check_group_size(config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n)


def run_ppo(config: PPOTrainerConfig) -> None:
    """Train as the config says."""
    from caldera.trainer.ppo.setup import run  # torch and transformers take seconds to import

    run(config)


def train(config: PPOTrainerConfig) -> None:
    """Train as the config says, and tell where everything is."""
    from caldera.trainer.running import tell_end

    run_ppo(config)
    tell_end(config)


TRAIN = ConfigCommand(
    prog="caldera train",
    description="""\
Train a language model by reinforcement learning: it responds to prompts, the
responses are scored, and it learns from the scores.

  caldera train algorithm.adv_estimator=grpo data.train_files=train.jsonl \\
    actor_rollout_ref.model.path=MODEL custom_reward_function.path=reward.py \\
    actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_training_steps=100
  caldera train --config-path=FOLDER --config-name=my_run trainer.total_epochs=3
  caldera train --help algorithm.adv_estimator
""",
    config_name="ppo_trainer",
    schema=PPOTrainerConfig,
    work=train,
    check=check_training,
)
main = TRAIN.main

if __name__ == "__main__":
    sys.exit(main())
