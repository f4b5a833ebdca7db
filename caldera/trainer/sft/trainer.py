"""Supervised training: one controller that reads like a single-process program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from caldera.config import SFTTrainerConfig, TrainerConfig
from caldera.config.sft import EACH_EPOCH
from caldera.data import Batch, StatefulLoader
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from caldera.tracking import TrainingProgress
from caldera.trainer.checkpoint import CheckpointFolder, read_part, step_of
from caldera.trainer.ppo.dealing import DealtGroup
from caldera.trainer.ppo.metrics import marked_timer
from caldera.trainer.ppo.saving import CheckpointSaves
from caldera.trainer.running import open_run
from caldera.trainer.sft.validation import LossValidator
from caldera.workers.objective import Objective

Metrics = dict[str, float]
MakeGroups = Callable[[ResourcePool, dict[str, ClassWithInitArgs]], dict[str, WorkerGroup]]
ROLE = "supervised"
MODEL_FOLDER = "actor"
"""Of a checkpoint: where PPO has its policy, so that the same commands find both."""


class SupervisedTrainer:
    """Trains one model on an objective; a worker group decides where it lives."""

    def __init__(
        self,
        config: SFTTrainerConfig,
        objective: Objective,
        worker: ClassWithInitArgs,
        make_groups: MakeGroups,
        train_loader: StatefulLoader,
        validator: LossValidator | None,
    ) -> None:
        self.config = config
        self.objective = objective
        self.train_loader = train_loader
        self.validator = validator
        self.checkpoints = CheckpointFolder(_checkpoint_keys(config))
        self.total_steps = total_training_steps(config, train_loader)
        self.global_steps = 0
        self._worker = worker
        self._make_groups = make_groups
        self._group: WorkerGroup | None = None
        self._shown: dict[str, float] = {}

    def init_workers(self) -> None:
        """Create the worker group, and have it load the model."""
        trainer = self.config.trainer
        self.devices = (trainer.n_gpus_per_node or 1) * trainer.nnodes
        pool = ResourcePool([trainer.n_gpus_per_node or 1] * trainer.nnodes)
        self._group = self._make_groups(pool, {ROLE: self._worker})[ROLE]
        self._group.init_model()
        together = self.objective.rows_together
        rows = self.config.data.train_batch_size * together
        self.group = DealtGroup(
            self._group, self.config.data.balance_dp_token, {"train_batch": rows}, together
        )
        writers = [self.group] if trainer.checkpoint.async_save else []
        self.saves = CheckpointSaves(self.checkpoints, writers)

    def shutdown(self) -> None:
        """End the workers."""
        if self._group is not None:
            self._group.shutdown()

    def fit(self) -> None:
        """Train to the last step, from the newest checkpoint where there is one."""
        self.checkpoints.create()
        self._load_checkpoint()
        tracked = open_run(self.config, self.checkpoints.root, self.global_steps, self.total_steps)
        shown = TrainingProgress(self.total_steps, self.global_steps)
        with tracked as tracking, shown as progress, self.saves:
            rows = self._epochs()
            while self.global_steps < self.total_steps:
                tracking.log(self._train_on(next(rows), progress), self.global_steps)
                self.saves.poll()
                # After the row: a run that is killed in between repeats the step, row and all.
                if saving_time := self._save_if_due():
                    tracking.log(saving_time, self.global_steps)

    def _epochs(self) -> Iterator[Batch]:
        while True:
            yield from self.train_loader

    def _train_on(self, rows: Batch, progress: TrainingProgress) -> Metrics:
        """One step, and a validation when it is due."""
        self.global_steps += 1
        timing: dict[str, float] = {}
        batch = DataProto.from_single_dict(rows)
        with marked_timer("step", timing):
            metrics = step_metrics(self.group.train_batch(batch))
        tokens = int(tensors_of(batch)["attention_mask"].sum())
        metrics["train/tokens"] = tokens
        metrics["perf/throughput"] = tokens / timing["step"] / self.devices
        if self.validator is not None and self._is_due(self.config.trainer.test_freq):
            with marked_timer("testing", timing):
                metrics |= self.validator.run(self.group)
        metrics |= self.group.metrics(batch)
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        metrics["training/global_step"] = self.global_steps
        metrics["training/epoch"] = (self.global_steps - 1) // len(self.train_loader)
        self._show(progress, metrics)
        return metrics

    def _show(self, progress: TrainingProgress, metrics: Metrics) -> None:
        """Show the newest numbers; those that `metrics` lacks stay as they were."""
        names = {
            "train/loss": "loss",
            "val/loss": "validation_loss",
            "perf/throughput": "tokens_per_second",
        }
        self._shown |= {name: metrics[key] for key, name in names.items() if key in metrics}
        progress.update(self.global_steps, **self._shown)

    def _is_due(self, every: Any) -> bool:
        steps: int = len(self.train_loader) if every == EACH_EPOCH else every
        last = self.global_steps >= self.total_steps
        return steps > 0 and (last or self.global_steps % steps == 0)

    def _save_if_due(self) -> Metrics:
        """Save a checkpoint; returns how long it took, or nothing."""
        if not self._is_due(self.config.trainer.save_freq):
            return {}
        timing: dict[str, float] = {}
        with marked_timer("timing_s/save_checkpoint", timing):
            self.saves.save(self.global_steps, self._write_checkpoint)
        return timing | self.checkpoints.metrics()

    def _write_checkpoint(self, folder: Path) -> None:
        self.group.save_checkpoint(folder / MODEL_FOLDER)
        torch.save(self.train_loader.state_dict(), folder / "data.pt")
        state = {"global_steps": self.global_steps}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def _load_checkpoint(self) -> None:
        folder = self.checkpoints.to_resume()
        if folder is None:
            return
        self.group.load_checkpoint(folder / MODEL_FOLDER)
        self.train_loader.load_state_dict(read_part(folder / "data.pt", torch.load))
        self.global_steps = step_of(folder)
        self.checkpoints.loaded(folder)


def total_training_steps(config: SFTTrainerConfig, loader: StatefulLoader) -> int:
    """Steps of the whole run."""
    trainer = config.trainer
    return trainer.total_training_steps or trainer.total_epochs * len(loader)


def step_metrics(answer: DataProto) -> Metrics:
    """The ranks' metrics, of which the means are the whole's; of peaks of memory, the highest."""
    metrics: dict[str, Any] = answer.meta_info["metrics"]
    return {name: _of_ranks(name, value) for name, value in metrics.items()}


def _of_ranks(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return max(value) if "memory" in name else sum(value) / len(value)


def _checkpoint_keys(config: SFTTrainerConfig) -> TrainerConfig:
    """The keys of checkpoints, as a PPO run has them."""
    trainer = config.trainer
    return TrainerConfig(
        default_local_dir=trainer.default_local_dir,
        default_hdfs_dir=trainer.default_hdfs_dir,
        resume_mode=trainer.resume_mode,
        resume_from_path=trainer.resume_from_path,
        max_actor_ckpt_to_keep=trainer.max_ckpt_to_keep,
    )
