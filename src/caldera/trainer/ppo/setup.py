"""From a config to a trainer that is ready to fit."""

from __future__ import annotations

import logging
import random
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from caldera.config import (
    PPOTrainerConfig,
    needs_critic,
    needs_reference,
    resolve_for_machine,
    uses_ray,
)
from caldera.config.reward_checks import check_native_model
from caldera.config.strategies import roles
from caldera.data import (
    create_rl_dataset,
    create_train_loader,
    create_val_loader,
    hf_tokenizer,
)
from caldera.errors import ConfigError, WorkerError
from caldera.installation import install_command
from caldera.models.loading import import_external, is_language_model
from caldera.reward import StreamingScorer, load_reward_manager, streams
from caldera.single_controller import ClassWithInitArgs, ResourcePoolManager, Role
from caldera.tracking import check_loggers
from caldera.trainer.ppo.agents import data_with_tools, make_agents
from caldera.trainer.ppo.columns import check_columns
from caldera.trainer.ppo.groups import make_groups_for
from caldera.trainer.ppo.ray_trainer import MakeGroups, RayPPOTrainer, total_training_steps
from caldera.trainer.ppo.reward_servers import RewardServers
from caldera.trainer.ppo.tracing import make_tracer
from caldera.trainer.running import locked_run, stop_told
from caldera.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from caldera.workers.agents import MakeAgents
from caldera.workers.scoring import MakeScorer
from caldera.workers.tracing import MakeTracer

logger = logging.getLogger(__name__)

GLOBAL_POOL, REWARD_POOL = "global_pool", "reward_pool"


def seed_everything(seed: int) -> None:
    """Whatever draws from a global generator, such as dropout, draws the same in every run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run(config: PPOTrainerConfig) -> None:
    """Train as the config says: on this machine, or on a Ray cluster."""
    if uses_ray(config):
        from caldera.trainer.ray_runner import run_on_ray

        with stop_told(config):
            run_on_ray(config, settle, build_and_fit)
    else:
        settle(config, torch.cuda.device_count())
        check_installed(config)
        build_and_fit(config, make_groups_for(config))


def settle(config: PPOTrainerConfig, gpus: int) -> None:
    """Fill in what depends on the machine, or on the nodes of a cluster, and tell of it."""
    chosen = resolve_for_machine(config, gpus)
    if chosen:
        logger.info("chosen for this machine: %s", ", ".join(chosen))


def check_installed(config: PPOTrainerConfig) -> None:
    """What the workers of this machine are going to import is there."""
    users = [role.name for role in roles(config).values() if role.is_megatron and role.is_needed]
    if users and not has_megatron():
        raise ConfigError(
            f"{users[0]}.strategy='megatron' needs megatron-core: {install_command('megatron')}"
        )


def has_megatron() -> bool:
    """Whether megatron-core is installed here."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def build_and_fit(config: PPOTrainerConfig, make_groups: MakeGroups) -> None:
    """Train in worker groups that are made so."""
    TaskRunner(make_groups).run(config)


class TaskRunner:
    """Builds everything that a run needs, and runs it."""

    def __init__(self, make_groups: MakeGroups) -> None:
        self._make_groups = make_groups

    def run(self, config: PPOTrainerConfig) -> None:
        """Train; where workers die, go on from the last checkpoint as often as the config says."""
        with locked_run(config):
            for restarts_left in range(config.trainer.max_restarts, -1, -1):
                try:
                    self._run_once(config)
                    return
                except WorkerError as error:
                    if restarts_left == 0:
                        raise
                    left = restarts_left - 1
                    logger.error("%s", error)
                    logger.warning("restarting from the last checkpoint; %d left", left)

    def _run_once(self, config: PPOTrainerConfig) -> None:
        trainer = self.build(config)
        try:
            with stop_told(config, lambda: trainer.global_steps):
                trainer.init_workers()
                trainer.fit()
                trainer.actor_rollout_wg.finish_traces()
        finally:
            if trainer.checkpoints.has_saved:  # else a restart begins where this run began
                config.trainer.resume_mode = "auto"
            trainer.shutdown()

    def build(self, config: PPOTrainerConfig) -> RayPPOTrainer:
        """A trainer whose workers are still to be made."""
        check_loggers(config.trainer.logger)
        disable_progress_bar()  # of transformers, in loading and saving: it would tear our own
        seed_everything(config.actor_rollout_ref.rollout.seed)
        model, data = config.actor_rollout_ref.model, config.data
        import_external(model, "actor_rollout_ref.model")  # it may register estimators and losses
        reward_model = config.reward_model
        if reward_model.is_served and reward_model.has_worker:
            check_native_model(config, is_language_model(reward_model.model, "reward_model.model"))
        if data.tokenizer:  # checkpoints hold the tokenizer that the run used
            model.tokenizer_path = config.critic.model.tokenizer_path = data.tokenizer
        tokenizer = hf_tokenizer(
            model.tokenizer_path or str(model.path),
            trust_remote_code=model.trust_remote_code or data.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            key=f"actor_rollout_ref.model.{'tokenizer_path' if model.tokenizer_path else 'path'}",
        )
        prompts = data_with_tools(config)
        train_set = create_rl_dataset(
            data.train_files, prompts, tokenizer, max_samples=data.train_max_samples
        )
        val_set = create_rl_dataset(
            data.val_files, prompts, tokenizer, max_samples=data.val_max_samples
        )
        agents = make_agents(config, tokenizer, (train_set, val_set))
        tracer = make_tracer(config, tokenizer)
        train_loader = create_train_loader(train_set, data)
        total = total_training_steps(config, train_loader)
        config.actor_rollout_ref.actor.optim.total_training_steps = total
        config.critic.optim.total_training_steps = total
        servers = RewardServers(config)
        reward_fn = load_reward_manager(servers.config, tokenizer, num_examine=0)
        check_columns(config, reward_fn, train_set, val_set, agents_may_score=agents is not None)
        # Whatever samples answers, for training or validation, scores them alike.
        streamed = streams(config, reward_fn)
        make_scorer = partial(StreamingScorer, servers.config, tokenizer) if streamed else None
        return RayPPOTrainer(
            config,
            tokenizer,
            self._workers(config, make_scorer, agents, tracer),
            self._pools(config),
            self._make_groups,
            servers.awake(reward_fn),
            servers.awake(load_reward_manager(servers.config, tokenizer, num_examine=0)),
            train_loader,
            create_val_loader(val_set, data),
            servers,
            workers_need_rows=agents is not None or tracer is not None,
        )

    def _workers(
        self,
        config: PPOTrainerConfig,
        make_scorer: MakeScorer | None,
        agents: MakeAgents | None,
        tracer: MakeTracer | None,
    ) -> dict[Role, ClassWithInitArgs]:
        """How to make the worker of each role that this run needs."""
        device, parts = str(config.trainer.device), config.actor_rollout_ref
        policy = Role.ActorRolloutRef if needs_reference(config) else Role.ActorRollout
        arguments = (parts, policy.value, device, make_scorer, agents, tracer)
        workers = {policy: ClassWithInitArgs(ActorRolloutRefWorker, *arguments)}
        if needs_critic(config):
            workers[Role.Critic] = ClassWithInitArgs(
                CriticWorker, config.critic, parts.rollout.n, device
            )
        if config.reward_model.has_worker:
            workers[Role.RewardModel] = ClassWithInitArgs(
                RewardModelWorker, config.reward_model, device
            )
        return workers

    def _pools(self, config: PPOTrainerConfig) -> ResourcePoolManager:
        """All roles on all devices, but for a reward model with devices of its own."""
        trainer, reward_model = config.trainer, config.reward_model
        pools = {GLOBAL_POOL: [trainer.n_gpus_per_node or 1] * trainer.nnodes}
        mapping = dict.fromkeys(Role, GLOBAL_POOL)
        if reward_model.has_worker and reward_model.enable_resource_pool:
            pools[REWARD_POOL] = [reward_model.n_gpus_per_node] * reward_model.nnodes
            mapping[Role.RewardModel] = REWARD_POOL
        return ResourcePoolManager(pools, mapping)
