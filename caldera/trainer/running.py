"""What a training run opens before its first step: its config, its bundle and its loggers."""

from __future__ import annotations

from pathlib import Path

from caldera.config import PPOTrainerConfig, SFTTrainerConfig
from caldera.tracking import Tracking
from caldera.tracking.dumps import write_text_atomic
from caldera.trainer.bundle import write_bundle
from caldera.trainer.secrets import masked_dict, masked_yaml


def open_run(
    config: PPOTrainerConfig | SFTTrainerConfig, run_dir: Path, step: int, last_step: int
) -> Tracking:
    """The loggers of a run that is at this step; its folder says how to repeat it.

    A run that has come to its end already adds nothing to the folder.
    """
    trainer = config.trainer
    name = f"bundle_from_step_{step}" if step else "bundle"
    if step == 0 or step < last_step:
        write_text_atomic(run_dir / "config.yaml", [masked_yaml(config)])
        write_bundle(run_dir / name, config, "trainer.default_local_dir")
    return Tracking(
        trainer.project_name, trainer.experiment_name, trainer.logger, masked_dict(config),
        run_dir, step,
    )  # fmt: skip
