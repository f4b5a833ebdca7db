"""What workers with a model that is trained have in common: it is saved, and read back."""

from __future__ import annotations

from pathlib import Path

from caldera.config import CheckpointConfig, ModelConfig
from caldera.engine import Engine
from caldera.single_controller import Dispatch, Worker, register
from caldera.workers.building import save_role
from caldera.workers.phases import on_device


class TrainedWorker(Worker):
    def _trained(self) -> tuple[Engine, CheckpointConfig, ModelConfig]:
        """The engine that is trained, and the keys of its checkpoint and model."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path) -> None:
        """Write the model into the folder."""
        engine, checkpoint, model = self._trained()
        with on_device(engine, optimizer=True):
            save_role(engine, folder, checkpoint, model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self) -> bool:
        """Whether everything that `save_checkpoint` has to write is written."""
        return self._trained()[0].is_saved()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Return once it is."""
        self._trained()[0].wait_for_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path) -> None:
        """Read the model back."""
        engine, checkpoint, _ = self._trained()
        with on_device(engine, optimizer=True):
            engine.load(folder, checkpoint.load_contents)
