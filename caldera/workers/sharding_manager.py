"""Where a training engine and a sampler meet: the weights go over, and memory changes hands."""

from __future__ import annotations

from types import TracebackType

import torch

from caldera.engine import Engine, ForwardPlan
from caldera.models.forward import base_module
from caldera.protocol import DataProto
from caldera.rollout import Rollout
from caldera.rollout.engines.probe import Probe, probe_tokens
from caldera.rollout.engines.rollout import EngineRollout


class ShardingManager:
    """`with manager:` the sampler has the engine's newest weights and may use the memory.

    When both use one module there is nothing to copy. Otherwise the engine streams its weights,
    and does so only after they have changed. A sampler with a model of its own, such as vLLM, is
    told what that must then say of a probe.
    """

    def __init__(self, engine: Engine, rollout: Rollout, free_cache: bool) -> None:
        self._engine = engine
        self._rollout = rollout
        self._free_cache = free_cache
        self._shared = rollout.samples_from_module and rollout.module is engine.module
        self._pushed_version: int | None = None

    def update_weights(self) -> None:
        """Give the sampler the engine's newest weights, unless it has them."""
        if not self._shared and self._pushed_version != self._engine.version:
            self._engine.onload()
            if isinstance(self._rollout, EngineRollout):
                self._rollout.update(self._engine, self._engine.version)
                self._rollout.expect(self._probe(self._rollout))
            else:
                self._rollout.load_weights(self._engine.export_weights(), self._engine.version)
            self._engine.offload()
        self._pushed_version = self._rollout.version = self._engine.version

    def _probe(self, rollout: EngineRollout) -> Probe:
        """The trainer's side. Ranks that share a model run it together, on the same tokens."""
        vocabulary = base_module(self._engine.module).config.vocab_size
        tokens = probe_tokens(vocabulary, rollout.config.longest_sequence)
        ids = torch.tensor([tokens])  # (1, T)
        row = DataProto.from_dict({
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "responses": ids[:, 1:], "response_mask": torch.ones_like(ids[:, 1:]),
        })  # fmt: skip
        plan = ForwardPlan(("log_probs",), by_tokens=False, micro_batch_size=1, max_tokens=None)
        log_probs = self._engine.infer(row, plan)["log_probs"]  # (1, T - 1)
        return Probe(tokens, log_probs[0].tolist(), rollout.trainer_dtype)

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
