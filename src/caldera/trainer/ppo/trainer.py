"""PPO and its relatives: one controller that reads like a single-process program.

One step, from prompts to new weights, is `PPOTrainer.step`; its phases stand below it in the order
in which they run. Models live in worker groups; everything else happens here. What surrounds the
steps of every kind of training is `TrainingLoop`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from caldera.config import PPOTrainerConfig, needs_critic, needs_reference
from caldera.config.estimators import GREEDY_BASELINE, needs_of
from caldera.core_algos import agg_loss, get_kl_controller
from caldera.data import Batch, FixedLoader, StatefulLoader
from caldera.protocol import DataProto, tensors_of
from caldera.reward import RewardManager, streams
from caldera.single_controller import (
    Balancing,
    ClassWithInitArgs,
    ResourcePoolManager,
    Role,
    WorkerGroup,
)
from caldera.tracking import Generation
from caldera.trainer.groups import MakeGroups
from caldera.trainer.loop import TRAINERS, TrainingLoop
from caldera.trainer.metrics import Metrics, marked_timer, rank_metrics, with_role
from caldera.trainer.ppo.advantage import (
    apply_kl_penalty,
    compute_advantage,
    correct_rollout,
    resample,
    rewarded_part,
    scatter_rows,
    variance_metrics,
)
from caldera.trainer.ppo.agents import agent_metrics, with_agent_columns
from caldera.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
)
from caldera.trainer.ppo.prompts import check_loops, stamp_rows
from caldera.trainer.ppo.rewards import (
    FirstScores,
    RewardServers,
    component_metrics,
    record_scores,
    score_responses,
    takes_part,
    waited_for_rewards,
)
from caldera.trainer.ppo.validation import Validator, check_formats, dump_responses
from caldera.trainer.ppo.warning_signs import WarningSigns
from caldera.trainer.sources import RolloutSource, SynchronousSource
from caldera.workers import CriticWorker, PolicyWorker, RewardModelWorker, SamplerWorker
from caldera.workers.profiling import StepProfiler

logger = logging.getLogger(__name__)


@TRAINERS.register("ppo")
class PPOTrainer(TrainingLoop):
    """PPO and its relatives over worker groups; the groups decide where the models live.

    A subclass (`trainer.class=file.py:MyTrainer`) overrides a phase of `step`, or `validate`.
    """

    config: PPOTrainerConfig
    shown_metrics: ClassVar = {
        "critic/score/mean": "reward",
        "perf/throughput": "tokens_per_second",
    }

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: dict[Role, ClassWithInitArgs],
        resource_pool_manager: ResourcePoolManager,
        make_groups: MakeGroups,
        reward_fn: RewardManager,
        val_reward_fn: RewardManager,
        train_loader: StatefulLoader,
        val_loader: FixedLoader | None,
        reward_servers: RewardServers,
        workers_need_rows: bool = False,
    ) -> None:
        super().__init__(config, train_loader)
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.make_groups = make_groups
        self.reward_fn = reward_fn
        self.reward_servers = reward_servers
        self.sends_rows = workers_need_rows or streams(config, reward_fn)
        self.use_critic = needs_critic(config)
        self.use_reference = needs_reference(config)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.source: RolloutSource = SynchronousSource(config, self.rollout, self.score)
        self.stateful |= {"kl_ctrl": self.kl_controller, "rollout_source": self.source}
        self.profiler = StepProfiler(config)
        self.validates_first = config.trainer.val_before_train
        self.only_validates = config.trainer.val_only
        self._groups: dict[str, WorkerGroup] = {}
        self._signs = WarningSigns()
        self.meta = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        self.first_scores = FirstScores(config)
        self.validator = Validator(self, val_loader, val_reward_fn)

    # ------------------------------------------------------------------ around the steps

    def init_workers(self) -> None:
        """Create the worker groups, and have them load their models."""
        manager = self.resource_pool_manager
        manager.create_resource_pool()
        by_pool: dict[str, dict[str, ClassWithInitArgs]] = {}
        for role, recipe in self.role_worker_mapping.items():
            by_pool.setdefault(manager.mapping[role], {})[role.value] = recipe
        for pool, recipes in by_pool.items():  # the roles of a pool share its processes
            self._groups |= self.make_groups(manager.resource_pool_dict[pool], recipes)
        for group in self._groups.values():
            group.init_model()
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        policy = self._group(
            Role.ActorRolloutRef if self.use_reference else Role.ActorRollout,
            actor.ppo_mini_batch_size,
            "actor",
            actor.checkpoint.async_save,
        )
        # One group has both roles; nothing below depends on that.
        self.policy = policy.typed(PolicyWorker)
        self.sampler = policy.typed(SamplerWorker)
        self._policy_group = policy
        self.critic: CriticWorker | None = None
        if self.use_critic:
            self.critic = self._group(
                Role.Critic, critic.ppo_mini_batch_size, "critic", critic.checkpoint.async_save
            ).typed(CriticWorker)
        self.reward_model: RewardModelWorker | None = None
        if self.config.reward_model.enable and not self.config.reward_model.is_served:
            self.reward_model = self._group(Role.RewardModel).typed(RewardModelWorker)
        self.reward_servers.start(self._groups)

    def _group(
        self,
        role: Role,
        mini_batch_size: int | None = None,
        folder: str = "",
        saves_in_background: bool = False,
    ) -> WorkerGroup:
        """The group of a role, with the rows of its calls balanced over the ranks; one that has a
        folder in checkpoints is saved."""
        group = self._groups[role.value]
        samples = self.config.actor_rollout_ref.rollout.n * (mini_batch_size or 0)
        group.balancing = Balancing(self.config.trainer.balance_batch, samples or None)
        if folder:
            self.models[folder] = group
        if saves_in_background:
            self.checkpoints.writers.append(group)
        return group

    def shutdown(self) -> None:
        """End the workers."""
        self.reward_servers.close()
        for group in self._groups.values():
            group.shutdown()

    def validate(self) -> Metrics:
        """`val-core/...` and `val-aux/...` of the held-out prompts."""
        return self.validator.run(self.global_steps)

    def take_generations(self) -> list[Generation]:
        return self.validator.take_shown()

    def train_step(self, rows: Iterator[Batch]) -> Metrics:
        """`step`, with the metrics of its batch."""
        self.meta["global_steps"] = self.global_steps
        with self.profiler.recorded(self.global_steps, self._groups):
            batch, metrics, timing = self.step(rows)
        self.train_loader.on_batch_end(batch)
        metrics |= self._policy_group.balance_metrics(batch)
        metrics |= compute_data_metrics(batch, self.use_critic) | agent_metrics(batch)
        metrics |= component_metrics(batch, self.config)
        metrics |= compute_timing_metrics(batch, timing)
        gpus = self.resource_pool_manager.get_n_gpus()
        metrics |= compute_throughput_metrics(batch, timing, gpus)
        metrics |= variance_metrics(batch, metrics.get("actor/grad_norm"))
        for warning in self._signs.read(metrics, self.global_steps >= self.total_steps):
            logger.warning("step %d: %s", self.global_steps, warning)
        return metrics

    def _to_show(self, metrics: Metrics) -> dict[str, float]:
        accuracies = [
            value
            for key, value in metrics.items()
            if key.startswith("val-core/") and "/mean@" in key
        ]
        accuracy = {"accuracy": accuracies[-1]} if accuracies else {}
        return super()._to_show(metrics) | accuracy

    # ------------------------------------------------------------------ one step

    def step(self, rows: Iterator[Batch]) -> tuple[DataProto, Metrics, dict[str, float]]:
        """From prompts to new weights: (the batch, metrics, seconds by phase)."""
        timing: dict[str, float] = {}
        with marked_timer("step", timing):
            batch, metrics = self.source.next_batch(rows, timing)  # self.rollout, self.score
            self.evaluate(batch, metrics, timing)
            batch = self.advantage(batch, metrics, timing)
            self.update(batch, metrics, timing)
        return batch, metrics, timing

    def rollout(self, rows: Batch, attempt: int, timing: dict[str, float]) -> DataProto:
        """Sample n responses a prompt.

        Adds uid, prompts, responses, input_ids, attention_mask, position_ids, response_mask and
        rollout_log_probs; for estimators that need a greedy baseline also reward_baselines.
        """
        rollout = self.config.actor_rollout_ref.rollout
        place: tuple[int | str, ...] = ("train", self.global_steps)
        place += (attempt,) if attempt else ()
        prompts, batch = stamp_rows(
            rows, rollout.n, rollout.seed, place, self.meta, self.sends_rows
        )
        with marked_timer("gen", timing):
            responses = self.sampler.generate_sequences(prompts)
        waited_for_rewards(check_loops(batch, responses), timing)
        if GREEDY_BASELINE in needs_of(self.config.algorithm.adv_estimator):
            with marked_timer("gen_max", timing):
                tensors_of(responses)["reward_baselines"] = self._greedy_rewards(prompts, batch)
        return batch.union(with_agent_columns(responses))

    def score(self, batch: DataProto, timing: dict[str, float]) -> None:
        """Adds token_level_scores, has_reward, and what else the scorer said of each sample."""
        with marked_timer("reward", timing):
            scores, extras = self._rewards(batch)
        told = record_scores(batch, scores, extras, self.config)
        if folder := self.config.trainer.rollout_data_dir:
            dump_responses(batch, told, self.tokenizer, folder, self.global_steps)
        self.first_scores.check(extras)
        if self.global_steps == 1 and self.reward_model is None:
            check_formats(batch, self.tokenizer, self.config, self.validator.formats)

    def evaluate(self, batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> None:
        """Adds old_log_probs, and, where they are used, ref_log_prob and values."""
        tensors = tensors_of(batch)
        batch.meta_info["global_token_num"] = tensors["attention_mask"].sum(-1).tolist()
        if self.config.algorithm.rollout_correction.bypass_mode:
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
        else:
            with marked_timer("old_log_prob", timing):
                outputs = self.policy.compute_log_prob(batch)
            metrics |= rank_metrics(outputs) | self._mean_entropy(outputs, batch)
            batch.union(DataProto(outputs.batch))
        if self.use_reference:
            with marked_timer("ref", timing):
                batch.meta_info["full_kl"] = self.config.algorithm.kl_penalty == "full"
                batch.union(self.policy.compute_ref_log_prob(batch))
        if self.critic is not None:
            with marked_timer("values", timing):
                batch.union(self.critic.compute_values(batch))

    def advantage(self, batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> DataProto:
        """Adds token_level_rewards, advantages and returns; with rollout correction also
        rollout_is_weights. response_mask loses what is rejected, and rows without a reward."""
        algorithm = self.config.algorithm
        with marked_timer("adv", timing):
            part, rows = rewarded_part(batch, algorithm)
            if len(part):
                metrics |= apply_kl_penalty(part, algorithm, self.kl_controller)
                metrics |= correct_rollout(part, algorithm)
                compute_advantage(part, algorithm)
            scatter_rows(part, rows, batch)
            return resample(batch, algorithm, self.global_steps)

    def update(self, batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> None:
        """Train the critic, and after its warm-up the actor; the sampler gets the new weights."""
        if not tensors_of(batch)["response_mask"].any():
            logger.warning("step %d has nothing to learn from: no update", self.global_steps)
            return
        if self.critic is not None:
            with marked_timer("update_critic", timing):
                metrics |= with_role(metrics, self.critic.update_critic(batch))
        if self.config.trainer.critic_warmup <= self.global_steps:
            with marked_timer("update_actor", timing):
                metrics |= with_role(metrics, self.policy.update_actor(batch))
        with marked_timer("update_weights", timing):
            self.sampler.update_weights()
        self.source.on_new_weights(self.global_steps)

    # ------------------------------------------------------------------ around a step

    def _greedy_rewards(self, prompts: DataProto, batch: DataProto) -> torch.Tensor:
        """The reward of the most likely response to each row's prompt, (B,); NaN if it has none."""
        n = self.config.actor_rollout_ref.rollout.n
        firsts = prompts[::n]
        firsts.meta_info = prompts.meta_info | {"do_sample": False}
        sampled = self.sampler.generate_sequences(firsts)
        responses = batch[::n].union(with_agent_columns(sampled))
        rewards, extras = self._rewards(responses)
        is_there = takes_part(extras, len(responses), self.config)
        return torch.where(is_there, rewards.sum(-1), torch.nan).repeat_interleave(n)

    def _rewards(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """What the reward model, if there is one, and the reward manager say of each response."""
        if self.reward_model is not None:
            batch.union(self.reward_model.compute_rm_score(batch))
        return score_responses(batch, self.reward_fn, self.config)

    def _mean_entropy(self, outputs: DataProto, batch: DataProto) -> Metrics:
        """Take the entropies out of the outputs: their mean is all that is kept."""
        entropys = tensors_of(outputs.pop(["entropys"]))["entropys"]  # (B, R)
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        mean = agg_loss(entropys, tensors_of(batch)["response_mask"], mode)
        return {"actor/entropy": mean.item()}
