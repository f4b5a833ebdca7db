"""Loggers of other libraries, one a file, which imports its library when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from caldera.installation import install_command
from caldera.tracking.backends import clearml, mlflow, swanlab, tensorboard, trackio, wandb

__all__ = ["PACKAGES", "Package", "clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class Package:
    """What a logger needs."""

    module: str
    """Also the name that pip knows it by."""
    extra: str | None = None
    """The extra of Caldera's that brings it; None: it is installed by itself."""

    @property
    def install_command(self) -> str:
        return install_command(self.extra) if self.extra else f"pip install {self.module}"


PACKAGES = {
    "wandb": Package("wandb", "tracking"),
    "tensorboard": Package("tensorboard", "tracking"),
    "trackio": Package("trackio", "tracking"),
    "mlflow": Package("mlflow"),
    "swanlab": Package("swanlab"),
    "clearml": Package("clearml"),
}
"""By the logger's name."""
