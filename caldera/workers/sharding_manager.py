"""Where a training engine and a sampler meet: the weights go over, and memory changes hands."""

from __future__ import annotations

from types import TracebackType

from caldera.engine import Engine
from caldera.rollout import Rollout


class ShardingManager:
    """`with manager:` the sampler has the engine's newest weights and may use the memory.

    When both use one module there is nothing to copy. Otherwise the engine streams its weights,
    and does so only after they have changed.
    """

    def __init__(self, engine: Engine, rollout: Rollout, free_cache: bool) -> None:
        self._engine = engine
        self._rollout = rollout
        self._free_cache = free_cache
        self._shared = rollout.module is engine.module
        self._pushed_version: int | None = None

    def update_weights(self) -> None:
        """Give the sampler the engine's newest weights, unless it has them."""
        if not self._shared and self._pushed_version != self._engine.version:
            self._engine.onload()
            self._rollout.load_weights(self._engine.export_weights(), self._engine.version)
            self._engine.offload()
        self._pushed_version = self._rollout.version = self._engine.version

    def __enter__(self) -> None:
        self.update_weights()
        if self._shared:
            self._engine.onload()
        self._rollout.wake_up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._free_cache:
            self._rollout.sleep()
        if self._shared:
            self._engine.offload()
