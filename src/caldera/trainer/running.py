"""What a training run does around its steps: its folder, its loggers, and how its end is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

from caldera.config import PPOTrainerConfig, SFTTrainerConfig
from caldera.errors import CheckpointError, ConfigError
from caldera.storage import is_fetched, is_url
from caldera.storage.locks import locked_folder
from caldera.storage.writing import write_text_atomic
from caldera.tracking import Tracking
from caldera.tracking.progress import print_line
from caldera.trainer.bundle import write_bundle
from caldera.trainer.checkpoint import local_checkpoint, step_folder, tracked_step
from caldera.trainer.secrets import masked_dict, masked_yaml

RunConfig: TypeAlias = PPOTrainerConfig | SFTTrainerConfig
AUTO = "trainer.resume_mode=auto"


def locked_run(config: RunConfig) -> AbstractContextManager[None]:
    """Meanwhile no other run writes to the run's folder; one that does already is an error."""
    folder = config.trainer.default_local_dir
    if is_url(folder):  # which is refused later on
        return nullcontext()
    return locked_folder(_folder(config), f"trainer.default_local_dir={folder!r}")


def check_folders(config: RunConfig) -> None:
    """The folders that are read or written after models were loaded can be."""
    trainer = config.trainer
    for name in ("rollout_data_dir", "validation_data_dir"):
        if folder := getattr(trainer, name, None):
            try:
                Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"trainer.{name}={folder!r}: no folder can be made there: {error.strerror}"
                ) from error
    start = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    if start and not is_fetched(start):
        local_checkpoint(start)


def open_run(config: RunConfig, run_dir: Path, step: int, last_step: int) -> Tracking:
    """The loggers of a run that is at this step; its folder says how to repeat it.

    A run that has come to its end already adds nothing to the folder.
    """
    trainer = config.trainer
    name = f"bundle_from_step_{step}" if step else "bundle"
    if step == 0 or step < last_step:
        write_text_atomic(run_dir / "config.yaml", [masked_yaml(config)])
        write_bundle(run_dir / name, config, "trainer.default_local_dir")
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        masked_dict(config),
        run_dir,
        step,
        trainer.console_metrics,
    )


def check_steps_left(config: RunConfig, step: int, last_step: int) -> None:
    """Say that a resumed run has nothing left to train; one that is beyond its end is an error."""
    trainer = config.trainer
    if step == 0 or step < last_step or getattr(trainer, "val_only", False):
        return
    steps = f"trainer.total_training_steps={trainer.total_training_steps}"
    if trainer.total_training_steps is None:
        steps = f"trainer.total_epochs={trainer.total_epochs} epochs of the data"
    if step > last_step:
        raise CheckpointError(
            f"the checkpoint is of step {step}, but the run ends at step {last_step} ({steps}): "
            "nothing would be trained; raise it above, or trainer.resume_mode=disable starts anew"
        )
    print_line(
        f"Nothing is left to train: the checkpoint is of step {step}, the run's last ({steps}). "
        "To train on, raise trainer.total_training_steps or trainer.total_epochs"
    )


@contextmanager
def stop_told(config: RunConfig, at_step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Have Ctrl-C say how far the run has come, as far as that is known here, and from where it
    goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        step, saved, folder = at_step(), tracked_step(_folder(config)), _folder(config)
        told = f"stopped by Ctrl-C at step {step}." if step else "stopped by Ctrl-C."
        if saved is not None:
            how = "the same command" if config.trainer.resume_mode == "auto" else AUTO
            told += f" The checkpoint of step {saved} is in {folder}: {how} goes on from there."
        elif step:
            told += f" There is no checkpoint in {folder} yet: the same command begins anew."
        stop.add_note(told)
        raise


def tell_end(config: RunConfig) -> None:
    """Print where everything is."""
    folder = _folder(config)
    saved = tracked_step(folder)
    print_line(f"Run:        {folder}")
    if saved is not None:
        print_line(f"Checkpoint: {folder / step_folder(saved)}")
    elif config.trainer.save_freq == -1 and not getattr(config.trainer, "val_only", False):
        print_line("Checkpoint: none, as trainer.save_freq=-1 says; a number of steps saves them")
    if (folder / "metrics.jsonl").is_file():
        print_line(f"Its page:   caldera report {shlex.quote(str(folder))}")


def _folder(config: RunConfig) -> Path:
    return Path(config.trainer.default_local_dir).expanduser()
