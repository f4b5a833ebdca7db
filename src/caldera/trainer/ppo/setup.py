"""From a config to a trainer that is ready to fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from caldera.config import (
    DataConfig,
    PPOTrainerConfig,
    needs_critic,
    needs_reference,
    resolve_for_machine,
    uses_ray,
)
from caldera.config.batches import settle_batch_sizes
from caldera.config.machine import log_chosen
from caldera.config.reward import check_native_model
from caldera.config.rollout import check_rollout
from caldera.config.strategies import roles
from caldera.data import (
    chosen_class,
    create_rl_dataset,
    create_train_loader,
    create_val_loader,
    hf_tokenizer,
)
from caldera.engine.megatron import require_megatron
from caldera.errors import WorkerError
from caldera.models.loading import check_folder, import_external, is_language_model
from caldera.reward import StreamingScorer, load_reward_manager, streams
from caldera.rollout import sampler_class
from caldera.seeds import seed_everything
from caldera.single_controller import ClassWithInitArgs, ResourcePoolManager, Role
from caldera.tracking import check_loggers
from caldera.trainer.groups import MakeGroups, run_where_asked
from caldera.trainer.loop import TRAINERS, total_training_steps
from caldera.trainer.ppo.advantage import check_algorithm
from caldera.trainer.ppo.agents import agents_may_score, data_with_tools, make_agents
from caldera.trainer.ppo.columns import check_columns
from caldera.trainer.ppo.rewards import RewardServers
from caldera.trainer.ppo.tracing import make_tracer
from caldera.trainer.ppo.trainer import PPOTrainer
from caldera.trainer.running import check_folders, locked_run, stop_told
from caldera.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from caldera.workers.building import ChosenWorker
from caldera.workers.hooks import MakeHook
from caldera.workers.sampler import MakeAgents

logger = logging.getLogger(__name__)

GLOBAL_POOL, REWARD_POOL = "global_pool", "reward_pool"


def run(config: PPOTrainerConfig) -> None:
    """Train as the config says: on this machine, or on a Ray cluster."""
    run_where_asked(config, settle, check_installed, build_and_fit)


def settle(config: PPOTrainerConfig, gpus: int) -> None:
    """Fill in what depends on the machine, or on the nodes of a cluster, and tell of it."""
    log_chosen(resolve_for_machine(config, gpus))


def check_installed(config: PPOTrainerConfig) -> None:
    """What the workers of this machine are going to import is there."""
    users = [role.name for role in roles(config).values() if role.is_megatron and role.is_needed]
    if users:
        require_megatron(f"{users[0]}.strategy='megatron'")


def check_models(config: PPOTrainerConfig) -> None:
    """The folders of critic and reward model are there, before the policy is loaded."""
    if uses_ray(config):  # its nodes may have them elsewhere
        return
    if needs_critic(config):
        check_folder(config.critic.model, "critic.model")
    if config.reward_model.has_worker:
        check_folder(config.reward_model.model, "reward_model.model")


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
                trainer.sampler.finish_hooks()
        finally:
            if trainer.checkpoints.has_saved:  # else a restart begins where this run began
                config.trainer.resume_mode = "auto"
            trainer.shutdown()

    def build(self, config: PPOTrainerConfig) -> PPOTrainer:
        """A trainer whose workers are still to be made."""
        check_loggers(config.trainer.logger)
        check_folders(config)
        disable_progress_bar()  # of transformers, in loading and saving: it would tear our own
        seed_everything(config.actor_rollout_ref.rollout.seed)
        model, data = config.actor_rollout_ref.model, config.data
        import_external(model, "actor_rollout_ref.model")  # it may register estimators and losses
        trainer_class = chosen_class(TRAINERS, config.trainer.class_, PPOTrainer, "trainer.class")
        check_algorithm(config)
        check_models(config)
        rollout = config.actor_rollout_ref.rollout
        check_rollout(rollout, sampler_class(rollout.sampler).traits)
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
        prompts = data_with_tools(config, tokenizer)
        train_set = create_rl_dataset(
            data.train_files, prompts, tokenizer, max_samples=data.train_max_samples
        )
        val_set = self._validation_set(config, prompts, tokenizer)
        agents = make_agents(config, tokenizer, (train_set, val_set))
        tracer = make_tracer(config, tokenizer)
        self._choose_batches(config, len(train_set))
        train_loader = create_train_loader(train_set, data)
        total = total_training_steps(config, train_loader)
        config.actor_rollout_ref.actor.optim.total_training_steps = total
        config.critic.optim.total_training_steps = total
        servers = RewardServers(config)
        reward_fn = load_reward_manager(servers.config, tokenizer, num_examine=0)
        check_columns(
            config, reward_fn, train_set, val_set, agents_may_score(config, (train_set, val_set))
        )
        # Whatever samples responses, for training or validation, scores them alike.
        streamed = streams(config, reward_fn)
        # The tracer comes after the scorer: it writes the rewards down.
        scorer = partial(StreamingScorer, servers.config, tokenizer) if streamed else None
        hooks = [hook for hook in (scorer, tracer) if hook is not None]
        return trainer_class(
            config,
            tokenizer,
            self._workers(config, hooks, agents),
            self._pools(config),
            self._make_groups,
            servers.awake(reward_fn),
            servers.awake(load_reward_manager(servers.config, tokenizer, num_examine=0)),
            train_loader,
            create_val_loader(val_set, data) if data.val_files else None,
            servers,
            workers_need_rows=agents is not None or tracer is not None,
        )

    def _validation_set(
        self, config: PPOTrainerConfig, prompts: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> Any:
        """The rows to validate on; none where no file holds them."""
        data = config.data
        if not data.val_files:
            logger.info("no data.val_files: the run does not validate")
            return []
        return create_rl_dataset(
            data.val_files, prompts, tokenizer, max_samples=data.val_max_samples
        )

    def _choose_batches(self, config: PPOTrainerConfig, rows: int) -> None:
        if chosen := settle_batch_sizes(config, rows):
            logger.info(
                "chosen for %d training rows: %s; each step samples %d responses to each of %d "
                "prompts",
                rows,
                ", ".join(chosen),
                config.actor_rollout_ref.rollout.n,
                config.data.train_batch_size,
            )

    def _workers(
        self,
        config: PPOTrainerConfig,
        hooks: Sequence[MakeHook],
        agents: MakeAgents | None,
    ) -> dict[Role, ClassWithInitArgs]:
        """How to make the worker of each role that this run needs."""
        device, parts = str(config.trainer.device), config.actor_rollout_ref
        policy = Role.ActorRolloutRef if needs_reference(config) else Role.ActorRollout
        arguments = (parts, policy.value, device, hooks, agents)
        workers: dict[Role, ClassWithInitArgs] = {
            policy: ChosenWorker(
                parts.worker_class,
                ActorRolloutRefWorker,
                "actor_rollout_ref.worker_class",
                *arguments,
            )
        }
        if needs_critic(config):
            workers[Role.Critic] = ChosenWorker(
                config.critic.worker_class,
                CriticWorker,
                "critic.worker_class",
                config.critic,
                parts.rollout.n,
                device,
            )
        if config.reward_model.has_worker:
            workers[Role.RewardModel] = ChosenWorker(
                config.reward_model.worker_class,
                RewardModelWorker,
                "reward_model.worker_class",
                config.reward_model,
                device,
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
