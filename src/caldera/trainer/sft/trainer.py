"""Supervised training: one controller that reads like a single-process program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, cast

import torch

from caldera.config import SFTTrainerConfig, TrainerConfig
from caldera.core_algos import LossScale
from caldera.data import Batch, FixedLoader, StatefulLoader
from caldera.engine import Outputs
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import Balancing, ClassWithInitArgs, ResourcePool, WorkerGroup
from caldera.trainer.groups import MakeGroups
from caldera.trainer.loop import TRAINERS, TrainingLoop
from caldera.trainer.metrics import Metrics, marked_timer, rank_metrics
from caldera.workers import SupervisedWorker
from caldera.workers.supervised import Objective

# ---- The loss on rows that are not trained on


class LossValidator:
    """Every number is the one of the whole validation set, however it is cut into batches."""

    def __init__(self, config: SFTTrainerConfig, objective: Objective, loader: FixedLoader) -> None:
        self._loss_fn = objective.loss(config)
        self._outputs = objective.outputs
        self._loader = loader
        self._scale = _count(loader)

    @torch.no_grad()
    def run(self, group: SupervisedWorker) -> dict[str, float]:
        """val/loss, and what else the objective tells."""
        totals: dict[str, float] = {}
        for rows in self._loader:
            batch = DataProto.from_single_dict(rows)
            found = tensors_of(group.evaluate(batch))
            outputs = cast(Outputs, {name: found[name] for name in self._outputs})
            added = {k: v for k, v in found.items() if k not in self._outputs}
            for name, value in added.items():
                tensors_of(batch)[name] = value
            _, metrics = self._loss_fn(outputs, batch, self._scale)
            for name, share in metrics.items():
                totals[f"val/{name}"] = totals.get(f"val/{name}", 0.0) + share.item()
        return totals


def _count(loader: FixedLoader) -> LossScale:
    """The counts of all rows, which are thereby all read once before the run begins."""
    tokens = sequences = 0
    for rows in loader:
        mask = rows["response_mask"]
        assert isinstance(mask, torch.Tensor)
        counted = LossScale.from_mask(mask)
        tokens += int(counted.batch_num_tokens or 0)
        sequences += int(counted.global_batch_size or 0)
    return LossScale(tokens, sequences)


ROLE = "supervised"
MODEL_FOLDER = "actor"
"""Of a checkpoint: where PPO has its policy, so that the same commands find both."""


@TRAINERS.register("supervised")
class SupervisedTrainer(TrainingLoop):
    """Trains one model on an objective; a worker group decides where it lives."""

    config: SFTTrainerConfig
    shown_metrics: ClassVar = {
        "train/loss": "loss",
        "val/loss": "validation_loss",
        "perf/throughput": "tokens_per_second",
    }

    def __init__(
        self,
        config: SFTTrainerConfig,
        objective: Objective,
        worker: ClassWithInitArgs,
        make_groups: MakeGroups,
        train_loader: StatefulLoader,
        validator: LossValidator | None,
    ) -> None:
        super().__init__(config, _checkpoint_keys(config), train_loader)
        self.objective = objective
        self.validator = validator
        self._worker = worker
        self._make_groups = make_groups
        self._group: WorkerGroup | None = None

    def init_workers(self) -> None:
        """Create the worker group, and have it load the model."""
        trainer, data = self.config.trainer, self.config.data
        self.devices = (trainer.n_gpus_per_node or 1) * trainer.nnodes
        pool = ResourcePool([trainer.n_gpus_per_node or 1] * trainer.nnodes)
        self._group = group = self._make_groups(pool, {ROLE: self._worker})[ROLE]
        group.init_model()
        together = self.objective.rows_together
        group.balancing = Balancing(
            data.balance_dp_token, data.train_batch_size * together, together
        )
        self.models[MODEL_FOLDER] = group
        self.background_writers += [group] if trainer.checkpoint.async_save else []
        self.group = group
        self.model = group.typed(SupervisedWorker)

    def shutdown(self) -> None:
        """End the workers."""
        if self._group is not None:
            self._group.shutdown()

    def train_step(self, rows: Iterator[Batch]) -> Metrics:
        """One optimiser step on the next batch."""
        timing: dict[str, float] = {}
        batch = DataProto.from_single_dict(next(rows))
        with marked_timer("step", timing):
            metrics = rank_metrics(self.model.train_batch(batch))
        tokens = int(tensors_of(batch)["attention_mask"].sum())
        metrics["train/tokens"] = tokens
        metrics["perf/throughput"] = tokens / timing["step"] / self.devices
        metrics["timing_s/step"] = timing["step"]
        return metrics | self.group.balance_metrics(batch)

    def validate(self) -> Metrics:
        """`val/loss`, and what else the objective measures."""
        return {} if self.validator is None else self.validator.run(self.model)


def _checkpoint_keys(config: SFTTrainerConfig) -> TrainerConfig:
    """The keys of checkpoints, as a PPO run has them."""
    trainer = config.trainer
    return TrainerConfig(
        default_local_dir=trainer.default_local_dir,
        default_hdfs_dir=trainer.default_hdfs_dir,
        resume_mode=trainer.resume_mode,
        resume_from_path=trainer.resume_from_path,
        resume_fallback=trainer.resume_fallback,
        max_actor_ckpt_to_keep=trainer.max_ckpt_to_keep,
    )
