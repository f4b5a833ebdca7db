"""Which steps of a run are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from caldera.config import PPOTrainerConfig
from caldera.config.validate import profilers_of
from caldera.errors import ConfigError
from caldera.single_controller import WorkerGroup

NEEDS_CUDA = ("nsys", "torch_memory")


class StepProfiler:
    """Tells the workers to record the steps of `global_profiler.steps`."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._config = config.global_profiler
        self._steps = set(self._config.steps or ())
        self._records = False
        for key, role in profilers_of(config).items():
            if role.enable and role.tool in NEEDS_CUDA and config.trainer.device != "cuda":
                raise ConfigError(
                    f"{key}.tool={role.tool!r}: records a GPU, but trainer.device="
                    f"{config.trainer.device}; takes torch there"
                )

    @contextmanager
    def recorded(self, step: int, groups: Mapping[str, WorkerGroup]) -> Iterator[None]:
        """The block is this step; consecutive steps may be one recording."""
        if step in self._steps and not self._records:
            self._records = True
            for group in groups.values():
                group.start_profile(f"step_{step}", self._config.global_tool_config.torch_memory)
        try:
            yield
        except BaseException:
            self._records = False  # the workers may be gone
            raise
        is_last = not (self._config.profile_continuous_steps and step + 1 in self._steps)
        if self._records and is_last:
            self._records = False
            for group in groups.values():
                group.stop_profile()
