"""From a config to a trainer that is ready to fit."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from caldera.config import (
    PPOTrainerConfig,
    needs_critic,
    needs_reference,
    resolve_for_machine,
)
from caldera.data import (
    create_rl_dataset,
    create_train_loader,
    create_val_loader,
    hf_tokenizer,
)
from caldera.models.loading import import_external
from caldera.reward import load_reward_manager
from caldera.single_controller import ResourcePoolManager, Role, Worker
from caldera.trainer.ppo.ray_trainer import RayPPOTrainer, total_training_steps
from caldera.workers import ActorRolloutRefWorker, CriticWorker

logger = logging.getLogger(__name__)

POOL = "global_pool"


def seed_everything(seed: int) -> None:
    """Whatever draws from a global generator, such as dropout, draws the same in every run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class TaskRunner:
    """Builds everything that a run needs, and runs it."""

    def run(self, config: PPOTrainerConfig) -> None:
        self.build(config).fit()

    def build(self, config: PPOTrainerConfig) -> RayPPOTrainer:
        """A trainer whose workers have loaded their models."""
        disable_progress_bar()  # of transformers, in loading and saving: it would tear our own
        seed_everything(config.actor_rollout_ref.rollout.seed)
        chosen = resolve_for_machine(config, torch.cuda.device_count())
        if chosen:
            logger.info("chosen for this machine: %s", ", ".join(chosen))
        model, data = config.actor_rollout_ref.model, config.data
        import_external(model, "actor_rollout_ref.model")  # it may register estimators and losses
        if data.tokenizer:  # checkpoints hold the tokenizer that the run used
            model.tokenizer_path = config.critic.model.tokenizer_path = data.tokenizer
        tokenizer = hf_tokenizer(
            model.tokenizer_path or str(model.path),
            trust_remote_code=model.trust_remote_code or data.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            key=f"actor_rollout_ref.model.{'tokenizer_path' if model.tokenizer_path else 'path'}",
        )
        train_set = create_rl_dataset(
            data.train_files, data, tokenizer, max_samples=data.train_max_samples
        )
        val_set = create_rl_dataset(
            data.val_files, data, tokenizer, max_samples=data.val_max_samples
        )
        train_loader = create_train_loader(train_set, data)
        total = total_training_steps(config, train_loader)
        config.actor_rollout_ref.actor.optim.total_training_steps = total
        config.critic.optim.total_training_steps = total
        trainer = RayPPOTrainer(
            config,
            tokenizer,
            self._workers(config),
            self._pools(config),
            load_reward_manager(config, tokenizer, num_examine=0),
            load_reward_manager(config, tokenizer, num_examine=0),
            train_loader,
            create_val_loader(val_set, data),
        )
        trainer.init_workers()
        return trainer

    def _workers(self, config: PPOTrainerConfig) -> dict[Role, Callable[[], Worker]]:
        """How to make the worker of each role that this run needs."""
        device = str(config.trainer.device)
        policy = Role.ActorRolloutRef if needs_reference(config) else Role.ActorRollout
        workers: dict[Role, Callable[[], Worker]] = {
            policy: lambda: ActorRolloutRefWorker(config.actor_rollout_ref, policy.value, device)
        }
        if needs_critic(config):
            n = config.actor_rollout_ref.rollout.n
            workers[Role.Critic] = lambda: CriticWorker(config.critic, n, device)
        return workers

    def _pools(self, config: PPOTrainerConfig) -> ResourcePoolManager:
        processes = [config.trainer.n_gpus_per_node or 1] * config.trainer.nnodes
        return ResourcePoolManager({POOL: processes}, {role: POOL for role in Role})
