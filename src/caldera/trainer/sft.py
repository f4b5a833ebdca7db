"""Supervised training: its trainer, and how a run is set up from its config."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from caldera.config import (
    SFTTrainerConfig,
    load_supervised_config,
    resolve_supervised,
)
from caldera.config.machine import log_chosen
from caldera.config.sft import choose_batch_size
from caldera.config.strategies import MEGATRON
from caldera.core_algos import LossScale
from caldera.data import Batch, FixedLoader, StatefulLoader, chosen_class, hf_tokenizer
from caldera.engine import Outputs
from caldera.engine.megatron import require_megatron
from caldera.errors import DataError
from caldera.models.loading import import_external
from caldera.protocol import DataProto, tensors_of
from caldera.seeds import seed_everything
from caldera.single_controller import Balancing, ClassWithInitArgs, ResourcePool, WorkerGroup
from caldera.single_controller.torchrun import (
    TorchrunWorkerGroup,
    is_controller,
    launched_nodes,
    launched_ranks,
    serve,
)
from caldera.tracking import check_loggers
from caldera.trainer.entry import ConfigCommand, leave_to_rank_0, run_entry_point
from caldera.trainer.groups import MakeGroups, run_where_asked
from caldera.trainer.loop import TRAINERS, TrainingLoop, total_training_steps
from caldera.trainer.metrics import Metrics, marked_timer, rank_metrics
from caldera.trainer.running import check_folders, locked_run, stop_told, tell_end
from caldera.workers import SupervisedWorker
from caldera.workers.building import ChosenWorker
from caldera.workers.supervised import MODEL_KEY, Objective

logger = logging.getLogger(__name__)


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
        super().__init__(config, train_loader)
        self.objective = objective
        self.validator = validator
        self._worker = worker
        self._make_groups = make_groups

    def init_workers(self) -> None:
        """Create the worker group, and have it load the model."""
        trainer, data = self.config.trainer, self.config.data
        self.devices = (trainer.n_gpus_per_node or 1) * trainer.nnodes
        pool = ResourcePool([trainer.n_gpus_per_node or 1] * trainer.nnodes)
        group = self.models[MODEL_FOLDER] = self._make_groups(pool, {ROLE: self._worker})[ROLE]
        group.init_model()
        together = self.objective.rows_together
        assert data.train_batch_size is not None, "it is chosen with the training rows"
        group.balancing = Balancing(
            data.balance_dp_token, data.train_batch_size * together, together
        )
        self.checkpoints.writers += [group] if trainer.checkpoint.async_save else []
        self.group = group
        self.model = group.typed(SupervisedWorker)

    def shutdown(self) -> None:
        """End the workers."""
        for group in self.models.values():
            group.shutdown()

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


def run(config: SFTTrainerConfig, objective: Objective) -> None:
    """Train as the config says."""
    work = partial(build_and_fit, objective)
    if launched_ranks() > 1:
        assert is_controller(), "other ranks serve"
        _settle(config, torch.cuda.device_count(), launched_nodes())
        work(config, partial(_torchrun_groups, config))
    else:
        run_where_asked(config, _settle, _check_installed, work)


def serve_torchrun() -> None:
    """What the other processes of torchrun do."""
    disable_progress_bar()
    serve()


def build_and_fit(objective: Objective, config: SFTTrainerConfig, make_groups: MakeGroups) -> None:
    """Train in a worker group that is made so."""
    with locked_run(config):
        trainer = build(config, objective, make_groups)
        try:
            with stop_told(config, lambda: trainer.global_steps):
                trainer.init_workers()
                trainer.fit()
        finally:
            trainer.shutdown()


def build(
    config: SFTTrainerConfig, objective: Objective, make_groups: MakeGroups
) -> SupervisedTrainer:
    """A trainer whose workers are still to be made."""
    trainer = config.trainer
    check_loggers(trainer.logger)
    check_folders(config)
    disable_progress_bar()  # of transformers, in loading and saving: it would tear our own
    seed_everything(config.trainer.seed)
    model = config.model
    import_external(model, MODEL_KEY)
    trainer_class = chosen_class(TRAINERS, trainer.class_, SupervisedTrainer, "trainer.class")
    path_key = "model.partial_pretrain" if model.partial_pretrain else "model.path"
    tokenizer = hf_tokenizer(
        model.tokenizer_path or str(model.path),
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        key="model.tokenizer_path" if model.tokenizer_path else path_key,
    )
    loader = _train_loader(config, objective, tokenizer)
    steps = total_training_steps(config, loader)
    worker = ChosenWorker(
        trainer.worker_class,
        SupervisedWorker,
        "trainer.worker_class",
        config,
        objective,
        steps,
        str(trainer.device),
    )
    validator = _validator(config, objective, tokenizer)
    return trainer_class(config, objective, worker, make_groups, loader, validator)


def _settle(config: SFTTrainerConfig, gpus: int, launched: tuple[int, int] | None = None) -> None:
    """Fill in what depends on the machine, and tell of it."""
    log_chosen(resolve_supervised(config, gpus, launched))


def _check_installed(config: SFTTrainerConfig) -> None:
    """What the workers of this machine are going to import is there."""
    if config.model.strategy == MEGATRON:
        require_megatron("model.strategy='megatron'")


def _train_loader(
    config: SFTTrainerConfig, objective: Objective, tokenizer: PreTrainedTokenizerBase
) -> StatefulLoader:
    data = config.data
    rows = objective.dataset(data.train_files, data, tokenizer)
    batch_size = choose_batch_size(config, len(rows))
    if len(rows) < batch_size:
        raise DataError(
            f"the training set has {len(rows)} rows, fewer than one batch of "
            f"data.train_batch_size={batch_size}"
        )
    if data.train_batch_size is None:
        logger.info("chosen for %d training rows: data.train_batch_size=%d", len(rows), batch_size)
        data.train_batch_size = batch_size
    return StatefulLoader(
        rows,
        batch_size,
        seed=config.trainer.seed,
        shuffle=data.shuffle,
        num_workers=data.dataloader_num_workers,
        collate=_Collate(objective, tokenizer),
        seed_key="trainer.seed",
    )


def _validator(
    config: SFTTrainerConfig, objective: Objective, tokenizer: PreTrainedTokenizerBase
) -> LossValidator | None:
    data = config.data
    if not data.val_files or config.trainer.test_freq == -1:
        return None
    assert data.train_batch_size is not None, "it is chosen with the training rows"
    loader = FixedLoader(
        objective.dataset(data.val_files, data, tokenizer),
        data.train_batch_size,
        seed=config.trainer.seed,
        num_workers=data.dataloader_num_workers,
        collate=_Collate(objective, tokenizer),
    )
    return LossValidator(config, objective, loader)


class _Collate:
    """Items to a batch, also in other processes."""

    def __init__(self, objective: Objective, tokenizer: PreTrainedTokenizerBase) -> None:
        assert isinstance(tokenizer.pad_token_id, int), "one that lacks it is given one"
        self._collate = objective.collate
        self._pad_id = tokenizer.pad_token_id

    def __call__(self, items: Sequence[dict[str, Any]]) -> Batch:
        return self._collate(items, self._pad_id)


def _torchrun_groups(
    config: SFTTrainerConfig, pool: ResourcePool, recipes: dict[str, ClassWithInitArgs]
) -> dict[str, WorkerGroup]:
    """There is one role, and as many ranks as torchrun has started."""
    ((role, recipe),) = recipes.items()
    trainer = config.trainer
    group = TorchrunWorkerGroup(
        recipe, role, device=str(trainer.device), timeout_s=trainer.nccl_timeout
    )
    return {role: group}


# ---- The command line of supervised training, whatever its objective


@dataclass(frozen=True, kw_only=True)
class SupervisedCommand(ConfigCommand[SFTTrainerConfig]):
    """`key=value ...` for one objective."""

    overrides: tuple[str, ...] = ()
    """What this command always says."""
    takes_torchrun: bool = True

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run; returns the exit status."""
        asked = self.read(argv)
        if _is_served_by_another():
            leave_to_rank_0()
            # telling is for rank 0
            return 0 if asked.only_tells else run_entry_point(serve_torchrun)
        return self.run(asked)

    def load(
        self, overrides: Sequence[str], config_name: str, config_path: str | None
    ) -> SFTTrainerConfig:
        """The config, with what this command always says and every value checked."""
        given = [*self.overrides, *overrides]
        return load_supervised_config(given, config_name, config_path, self.schema)


def train(objective: str, config: SFTTrainerConfig) -> None:
    """Train on the objective `module:NAME`, and tell where everything is."""
    module, _, name = objective.partition(":")
    run(config, getattr(importlib.import_module(module), name))
    tell_end(config)


def _is_served_by_another() -> bool:
    """Whether this is a process of torchrun's that another one gives its work to."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
