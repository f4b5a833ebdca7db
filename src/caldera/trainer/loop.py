"""The loop of every training run: epochs, validation, checkpoints, resuming and tracking.

A kind of training is a subclass: it makes the worker groups, and says what a step is.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from caldera.config.sft import EACH_EPOCH
from caldera.data import Batch, StatefulLoader
from caldera.data.importing import named_function
from caldera.registry import Registry
from caldera.single_controller import WorkerGroup
from caldera.tracking import Generation, Tracking, TrainingProgress
from caldera.trainer.checkpoint import CheckpointFolder, read_part, read_position, step_of
from caldera.trainer.metrics import Metrics, marked_timer
from caldera.trainer.running import RunConfig, check_steps_left, open_run

logger = logging.getLogger(__name__)


class StopTraining(Exception):
    """Raised by a callback of a run: it ends after this step, as it does after its last."""


class Stateful(Protocol):
    """What a checkpoint can keep, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


TRAINERS: Registry[type[TrainingLoop]] = Registry("trainer")
"""What `trainer.class` chooses from."""


class TrainingLoop(ABC):
    """A run over the rows of a loader. `fit` is the loop; the methods below it are its parts."""

    shown_metrics: ClassVar[Mapping[str, str]] = {}
    """Metrics that the progress line shows, and under which names."""
    validates_first = False
    """Validate before the first step."""
    only_validates = False
    """End after that validation."""

    def __init__(self, config: RunConfig, train_loader: StatefulLoader) -> None:
        self.config = config
        self.train_loader = train_loader
        self.checkpoints = CheckpointFolder(config.trainer)
        self.global_steps = 0
        self.total_steps = total_training_steps(config, train_loader)
        self.models: dict[str, WorkerGroup] = {}
        """The groups that are saved, by their folder in a checkpoint."""
        self.stateful: dict[str, Stateful] = {}
        """Parts of the controller that a checkpoint keeps, by their name in it."""
        self.callbacks = [
            named_function(name, "trainer.callbacks") for name in config.trainer.callbacks
        ]
        self._shown: dict[str, float] = {}

    # ------------------------------------------------------------------ a kind of training

    @abstractmethod
    def init_workers(self) -> None:
        """Create the worker groups, and have them load their models; sets `models`."""

    @abstractmethod
    def train_step(self, rows: Iterator[Batch]) -> Metrics:
        """One step on the next rows; returns its metrics, with `timing_s/{phase}`."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers."""

    def validate(self) -> Metrics:
        """Metrics `val...` of the held-out rows; nothing where there are none."""
        return {}

    def take_generations(self) -> list[Generation]:
        """The responses of the last validation that loggers show as a table, once."""
        return []

    # ------------------------------------------------------------------ the loop

    def fit(self) -> None:
        """Train to the last step, from the newest checkpoint where there is one."""
        self.checkpoints.create()
        self._load_checkpoint()
        check_steps_left(self.config, self.global_steps, self.total_steps)
        tracked = open_run(self.config, self.checkpoints.root, self.global_steps, self.total_steps)
        shown = TrainingProgress(self.total_steps, self.global_steps)
        with tracked as tracking, shown as progress, self.checkpoints:
            if self.only_validates or (self.validates_first and self.global_steps == 0):
                self._log(tracking, progress, self.validate())
            rows = self._epochs()
            while self.global_steps < self.total_steps and not self.only_validates:
                self.global_steps += 1
                metrics = self.train_step(rows)
                if self._is_due(self.config.trainer.test_freq):
                    metrics |= self._timed_validation()
                metrics["training/global_step"] = self.global_steps
                metrics["training/epoch"] = (self.global_steps - 1) // len(self.train_loader)
                self._log(tracking, progress, metrics)
                self._call_back(metrics)
                self.checkpoints.poll()
                # After the row: a run that is killed in between repeats the step, row and all.
                if self._is_due(self.config.trainer.save_freq):
                    self._save(tracking)

    def _epochs(self) -> Iterator[Batch]:
        while True:
            yield from self.train_loader

    def _timed_validation(self) -> Metrics:
        timing: dict[str, float] = {}
        with marked_timer("testing", timing):
            metrics = self.validate()
        return metrics | {f"timing_s/{name}": seconds for name, seconds in timing.items()}

    def _log(self, tracking: Tracking, progress: TrainingProgress, metrics: Metrics) -> None:
        tracking.log(metrics, self.global_steps)
        tracking.log_generations(self.take_generations(), self.global_steps)
        self._shown |= self._to_show(metrics)  # what `metrics` lacks stays as it was
        progress.update(self.global_steps, **self._shown)

    def _call_back(self, metrics: Metrics) -> None:
        """Tell the callbacks of a step. One that asks to stop makes it the last."""
        try:
            for callback in self.callbacks:
                callback(self.global_steps, dict(metrics))
        except StopTraining as stop:
            logger.info("step %d is the last: %s", self.global_steps, stop or "a callback stopped")
            self.total_steps = self.global_steps

    def _to_show(self, metrics: Metrics) -> dict[str, float]:
        names = self.shown_metrics
        return {name: metrics[key] for key, name in names.items() if key in metrics}

    def _is_due(self, every: int | str) -> bool:
        """Whether what happens every so many steps, or each epoch, happens now."""
        steps = len(self.train_loader) if every == EACH_EPOCH else int(every)
        last = self.global_steps >= self.total_steps
        return steps > 0 and (last or self.global_steps % steps == 0)

    # ------------------------------------------------------------------ checkpoints

    def _save(self, tracking: Tracking) -> None:
        started = time.perf_counter()

        def log_time() -> None:
            seconds = {"timing_s/save_checkpoint": time.perf_counter() - started}
            tracking.log(seconds | self.checkpoints.metrics(), self.global_steps)

        self.checkpoints.save(self.global_steps, self._write_checkpoint, log_time)

    def _write_checkpoint(self, folder: Path) -> None:
        for name, group in self.models.items():
            group.save_checkpoint(folder / name)
        torch.save(self.train_loader.state_dict(), folder / "data.pt")
        parts = {name: part.state_dict() for name, part in self.stateful.items()}
        kept = {name: part for name, part in parts.items() if part}  # many have nothing to keep
        state = {"global_steps": self.global_steps, **kept}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def _load_checkpoint(self) -> None:
        folder = self.checkpoints.to_resume()
        if folder is None:
            return
        for name, group in self.models.items():
            group.load_checkpoint(folder / name)
        self.train_loader.load_state_dict(read_position(folder))
        state_file = folder / "trainer_state.json"
        state = read_part(state_file, lambda path: json.loads(path.read_text()))
        for name, part in self.stateful.items():
            if name in state:
                part.load_state_dict(state[name])
        self.global_steps = step_of(folder)
        self.checkpoints.loaded(folder)


def total_training_steps(config: RunConfig, loader: StatefulLoader) -> int:
    """Steps of the whole run."""
    trainer = config.trainer
    return trainer.total_training_steps or trainer.total_epochs * len(loader)
