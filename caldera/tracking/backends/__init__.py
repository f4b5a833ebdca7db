"""Loggers of other libraries, one a file, which imports its library when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from caldera.tracking.backends import clearml, mlflow, swanlab, tensorboard, trackio, wandb

__all__ = ["PACKAGES", "Package", "clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]

TRACKING_EXTRA = "'caldera[tracking]'"


@dataclass(frozen=True)
class Package:
    """What a logger needs."""

    module: str
    install: str
    """The argument of `pip install`."""


PACKAGES = {
    "wandb": Package("wandb", TRACKING_EXTRA),
    "tensorboard": Package("tensorboard", TRACKING_EXTRA),
    "trackio": Package("trackio", TRACKING_EXTRA),
    "mlflow": Package("mlflow", "mlflow"),
    "swanlab": Package("swanlab", "swanlab"),
    "clearml": Package("clearml", "clearml"),
}
"""By the logger's name."""
