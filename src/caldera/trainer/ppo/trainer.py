"""The training loop: one controller that reads like a single-process program.

One step, from prompts to new weights, is `RayPPOTrainer.step`; its phases stand below it in the
order in which they run. Models live in worker groups; everything else happens here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from caldera.config import PPOTrainerConfig, needs_critic, needs_reference
from caldera.core_algos import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    agg_loss,
    get_kl_controller,
)
from caldera.data import (
    Batch,
    FixedLoader,
    StatefulLoader,
    registered_or_own,
)
from caldera.protocol import DataProto, tensors_of
from caldera.reward import RewardManager, streams
from caldera.single_controller import (
    ClassWithInitArgs,
    ResourcePool,
    ResourcePoolManager,
    Role,
    WorkerGroup,
)
from caldera.tracking import TrainingProgress
from caldera.trainer.checkpoint import CheckpointFolder, read_part, step_of
from caldera.trainer.ppo.advantage import (
    compute_advantage,
    correct_rollout,
    penalise_distance,
    put_back,
    redraw,
    rewarded_part,
    variance_metrics,
)
from caldera.trainer.ppo.agent_rows import agent_metrics, with_agent_columns
from caldera.trainer.ppo.dealing import DealtGroup
from caldera.trainer.ppo.dynamic_sampling import GroupFilter
from caldera.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    marked_timer,
)
from caldera.trainer.ppo.prompts import check_loops, stamp_rows
from caldera.trainer.ppo.reward_servers import RewardServers
from caldera.trainer.ppo.rewards import (
    FirstScores,
    component_metrics,
    record_scores,
    score_answers,
    takes_part,
    waited_for_rewards,
)
from caldera.trainer.ppo.saving import CheckpointSaves, background_writers
from caldera.trainer.ppo.validation import Validator, dump_answers
from caldera.trainer.profiling import StepProfiler
from caldera.trainer.running import open_run

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
MakeGroups = Callable[[ResourcePool, dict[str, ClassWithInitArgs]], dict[str, WorkerGroup]]
"""(a pool, the roles that share it) -> a group for each role."""


class RayPPOTrainer:
    """PPO and its relatives over worker groups; the groups decide where the models live."""

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
        val_loader: FixedLoader,
        reward_servers: RewardServers,
        workers_need_rows: bool = False,
    ) -> None:
        # Unknown names fail before any work.
        registered_or_own(ADV_ESTIMATORS, config.algorithm.adv_estimator)
        registered_or_own(POLICY_LOSSES, config.actor_rollout_ref.actor.policy_loss.loss_mode)
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.make_groups = make_groups
        self._groups: dict[str, WorkerGroup] = {}
        self.reward_fn = reward_fn
        self.reward_servers = reward_servers
        self.sends_rows = workers_need_rows or streams(config, reward_fn)
        self.train_loader = train_loader
        self.use_critic = needs_critic(config)
        self.use_reference = needs_reference(config)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.checkpoints = CheckpointFolder(config.trainer)
        self.profiler = StepProfiler(config)
        self.global_steps = 0
        self._shown: dict[str, float] = {}
        self.total_steps = total_training_steps(config, train_loader)
        self._meta = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        self.first_scores = FirstScores(config)
        self.validator = Validator(
            config, tokenizer, val_loader, val_reward_fn,
            lambda prompts: self.actor_rollout_wg.generate_sequences(prompts), self._meta,
            self.sends_rows, self.first_scores,
        )  # fmt: skip

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
        policy = Role.ActorRolloutRef if self.use_reference else Role.ActorRollout
        self.actor_rollout_wg = self._dealt(policy)
        self.critic_wg = self._dealt(Role.Critic) if self.use_critic else None
        judges = self.config.reward_model.enable and not self.config.reward_model.is_served
        self.rm_wg = self._dealt(Role.RewardModel) if judges else None
        self.reward_servers.start(self._groups)
        writers = background_writers(self.config, self.actor_rollout_wg, self.critic_wg)
        self.saves = CheckpointSaves(self.checkpoints, writers)

    def _dealt(self, role: Role) -> DealtGroup:
        n = self.config.actor_rollout_ref.rollout.n
        mini_batch_sizes = {
            "update_actor": self.config.actor_rollout_ref.actor.ppo_mini_batch_size * n,
            "update_critic": self.config.critic.ppo_mini_batch_size * n,
        }
        balance = self.config.trainer.balance_batch
        return DealtGroup(self._groups[role.value], balance, mini_batch_sizes)

    def shutdown(self) -> None:
        """End the workers."""
        self.reward_servers.close()
        for group in self._groups.values():
            group.shutdown()

    # ------------------------------------------------------------------ the run

    def fit(self) -> None:
        """Train to the last step, from the newest checkpoint where there is one."""
        trainer = self.config.trainer
        self.checkpoints.create()
        self._load_checkpoint()
        tracked = open_run(self.config, self.checkpoints.root, self.global_steps, self.total_steps)
        shown = TrainingProgress(self.total_steps, self.global_steps)
        with tracked as tracking, shown as progress, self.saves:
            if trainer.val_only or (trainer.val_before_train and self.global_steps == 0):
                tracking.log(self._validate(progress), self.global_steps)
                tracking.log_generations(self.validator.take_shown(), self.global_steps)
            if trainer.val_only:
                return
            rows = self._epochs()
            while self.global_steps < self.total_steps:
                tracking.log(self._train_on(rows, progress), self.global_steps)
                tracking.log_generations(self.validator.take_shown(), self.global_steps)
                self.saves.poll()
                # After the row: a run that is killed in between repeats the step, row and all.
                if saving_time := self._save_if_due():
                    tracking.log(saving_time, self.global_steps)

    def _epochs(self) -> Iterator[Batch]:
        while True:
            yield from self.train_loader

    def _train_on(self, rows: Iterator[Batch], progress: TrainingProgress) -> Metrics:
        """One step, and a validation when it is due."""
        self.global_steps += 1
        self._meta["global_steps"] = self.global_steps
        with self.profiler.recorded(self.global_steps, self._groups):
            batch, metrics, timing = self.step(rows)
        self.train_loader.on_batch_end(batch)
        if self._is_due(self.config.trainer.test_freq):
            with marked_timer("testing", timing):
                metrics |= self._validate(progress)
        gpus = self.resource_pool_manager.get_n_gpus()
        metrics |= self.actor_rollout_wg.metrics(batch)
        metrics |= compute_data_metrics(batch, self.use_critic) | agent_metrics(batch)
        metrics |= component_metrics(batch, self.config)
        metrics |= compute_timing_metrics(batch, timing)
        metrics |= compute_throughput_metrics(batch, timing, gpus)
        metrics |= variance_metrics(batch, metrics.get("actor/grad_norm"))
        metrics["training/global_step"] = self.global_steps
        metrics["training/epoch"] = (self.global_steps - 1) // len(self.train_loader)
        self._show(progress, metrics)
        return metrics

    # ------------------------------------------------------------------ one step

    def step(self, rows: Iterator[Batch]) -> tuple[DataProto, Metrics, dict[str, float]]:
        """From prompts to new weights: (the batch, metrics, seconds by phase)."""
        timing: dict[str, float] = {}
        with marked_timer("step", timing):
            groups = GroupFilter(self.config)
            while not groups.enough:  # once, but for dynamic sampling
                batch = self._rollout(next(rows), groups.batches, timing)
                self._score(batch, timing)
                groups.add(batch)
            batch, metrics = groups.take()
            self._evaluate(batch, metrics, timing)
            batch = self._advantage(batch, metrics, timing)
            self._update(batch, metrics, timing)
        return batch, metrics, timing

    def _rollout(self, rows: Batch, attempt: int, timing: dict[str, float]) -> DataProto:
        """Sample n answers a prompt.

        Adds uid, prompts, responses, input_ids, attention_mask, position_ids, response_mask and
        rollout_log_probs; for ReMax also reward_baselines.
        """
        rollout = self.config.actor_rollout_ref.rollout
        place: tuple[int | str, ...] = ("train", self.global_steps)
        place += (attempt,) if attempt else ()
        prompts, batch = stamp_rows(
            rows, rollout.n, rollout.seed, place, self._meta, self.sends_rows
        )
        with marked_timer("gen", timing):
            answers = self.actor_rollout_wg.generate_sequences(prompts)
        waited_for_rewards(check_loops(batch, answers), timing)
        if self.config.algorithm.adv_estimator == "remax":
            with marked_timer("gen_max", timing):
                tensors_of(answers)["reward_baselines"] = self._greedy_rewards(prompts, batch)
        return batch.union(with_agent_columns(answers))

    def _score(self, batch: DataProto, timing: dict[str, float]) -> None:
        """Adds token_level_scores, has_reward, and what else the scorer said of each sample."""
        with marked_timer("reward", timing):
            scores, extras = self._rewards(batch)
        self._dump(batch, record_scores(batch, scores, extras, self.config))
        self.first_scores.check(extras)

    def _evaluate(self, batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> None:
        """Adds old_log_probs, and, where they are used, ref_log_prob and values."""
        tensors = tensors_of(batch)
        batch.meta_info["global_token_num"] = tensors["attention_mask"].sum(-1).tolist()
        if self.config.algorithm.rollout_correction.bypass_mode:
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
        else:
            with marked_timer("old_log_prob", timing):
                outputs = self.actor_rollout_wg.compute_log_prob(batch)
            metrics |= _worker_metrics(outputs) | self._mean_entropy(outputs, batch)
            batch.union(DataProto(outputs.batch))
        if self.use_reference:
            with marked_timer("ref", timing):
                batch.meta_info["full_kl"] = self.config.algorithm.kl_penalty == "full"
                batch.union(self.actor_rollout_wg.compute_ref_log_prob(batch))
        if self.critic_wg is not None:
            with marked_timer("values", timing):
                batch.union(self.critic_wg.compute_values(batch))

    def _advantage(self, batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> DataProto:
        """Adds token_level_rewards, advantages and returns; with rollout correction also
        rollout_is_weights. response_mask loses what is rejected, and rows without a reward."""
        algorithm = self.config.algorithm
        with marked_timer("adv", timing):
            part, rows = rewarded_part(batch, algorithm)
            if len(part):
                metrics |= penalise_distance(part, algorithm, self.kl_controller)
                metrics |= correct_rollout(part, algorithm)
                compute_advantage(part, algorithm)
            put_back(part, rows, batch)
            return redraw(batch, algorithm, self.global_steps)

    def _update(self, batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> None:
        """Train the critic, and after its warm-up the actor; the sampler gets the new weights."""
        if not tensors_of(batch)["response_mask"].any():
            logger.warning("step %d has nothing to learn from: no update", self.global_steps)
            return
        if self.critic_wg is not None:
            with marked_timer("update_critic", timing):
                metrics |= _worker_metrics(self.critic_wg.update_critic(batch))
        if self.config.trainer.critic_warmup <= self.global_steps:
            with marked_timer("update_actor", timing):
                metrics |= _worker_metrics(self.actor_rollout_wg.update_actor(batch))
        with marked_timer("update_weights", timing):
            self.actor_rollout_wg.update_weights()

    # ------------------------------------------------------------------ around a step

    def _greedy_rewards(self, prompts: DataProto, batch: DataProto) -> torch.Tensor:
        """The reward of the most likely answer to each row's prompt, (B,); NaN if it has none."""
        n = self.config.actor_rollout_ref.rollout.n
        firsts = prompts[::n]
        firsts.meta_info = prompts.meta_info | {"do_sample": False}
        sampled = self.actor_rollout_wg.generate_sequences(firsts)
        answers = batch[::n].union(with_agent_columns(sampled))
        rewards, extras = self._rewards(answers)
        is_there = takes_part(extras, len(answers), self.config)
        return torch.where(is_there, rewards.sum(-1), torch.nan).repeat_interleave(n)

    def _rewards(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """What the reward model, if there is one, and the reward manager say of each answer."""
        if self.rm_wg is not None:
            batch.union(self.rm_wg.compute_rm_score(batch))
        return score_answers(batch, self.reward_fn, self.config)

    def _mean_entropy(self, outputs: DataProto, batch: DataProto) -> Metrics:
        """Take the entropies out of the outputs: their mean is all that is kept."""
        entropys = tensors_of(outputs.pop(["entropys"]))["entropys"]  # (B, R)
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        mean = agg_loss(entropys, tensors_of(batch)["response_mask"], mode)
        return {"actor/entropy": mean.item()}

    def _validate(self, progress: TrainingProgress) -> Metrics:
        metrics = self.validator.run(self.global_steps)
        self._show(progress, metrics)
        return metrics

    def _show(self, progress: TrainingProgress, metrics: Metrics) -> None:
        """Show the newest numbers; those that `metrics` lacks stay as they were."""
        names = {"critic/score/mean": "reward", "perf/throughput": "tokens_per_second"}
        for key, value in metrics.items():
            if key.startswith("val-core/") and "/mean@" in key:
                self._shown["accuracy"] = value
            elif key in names:
                self._shown[names[key]] = value
        progress.update(self.global_steps, **self._shown)

    def _save_if_due(self) -> Metrics:
        """Save a checkpoint; returns how long it took, or nothing."""
        if not self._is_due(self.config.trainer.save_freq):
            return {}
        timing: dict[str, float] = {}
        with marked_timer("timing_s/save_checkpoint", timing):
            self.saves.save(self.global_steps, self._write_checkpoint)
        return timing | self.checkpoints.metrics()

    def _is_due(self, every: int) -> bool:
        last = self.global_steps >= self.total_steps
        return every > 0 and (last or self.global_steps % every == 0)

    def _dump(self, batch: DataProto, extra_keys: list[str]) -> None:
        if folder := self.config.trainer.rollout_data_dir:
            dump_answers(batch, extra_keys, self.tokenizer, folder, self.global_steps)

    def _write_checkpoint(self, folder: Path) -> None:
        self.actor_rollout_wg.save_checkpoint(folder / "actor")
        if self.critic_wg is not None:
            self.critic_wg.save_checkpoint(folder / "critic")
        torch.save(self.train_loader.state_dict(), folder / "data.pt")
        state = {"global_steps": self.global_steps, "kl_ctrl": self.kl_controller.state_dict()}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def _load_checkpoint(self) -> None:
        folder = self.checkpoints.to_resume()
        if folder is None:
            return
        self.actor_rollout_wg.load_checkpoint(folder / "actor")
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(folder / "critic")
        self.train_loader.load_state_dict(read_part(folder / "data.pt", torch.load))
        state_file = folder / "trainer_state.json"
        state = read_part(state_file, lambda path: json.loads(path.read_text()))
        self.kl_controller.load_state_dict(state["kl_ctrl"])
        self.global_steps = self._meta["global_steps"] = step_of(folder)
        self.checkpoints.loaded(folder)


def total_training_steps(config: PPOTrainerConfig, loader: StatefulLoader) -> int:
    """Steps of the whole run."""
    trainer = config.trainer
    return trainer.total_training_steps or trainer.total_epochs * len(loader)


def _worker_metrics(output: DataProto) -> Metrics:
    metrics: dict[str, Any] = output.meta_info.get("metrics", {})
    return {
        name: sum(value) / len(value) if isinstance(value, list) else value
        for name, value in metrics.items()
    }
