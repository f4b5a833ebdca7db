"""Weight sync: the one place where a training engine and a sampler meet."""

from __future__ import annotations

import torch

from caldera.engine import Engine, ForwardPlan
from caldera.models.forward import base_module
from caldera.protocol import DataProto
from caldera.rollout import Rollout
from caldera.rollout.weights import Probe, probe_tokens


class WeightSync:
    """`with weight_sync:` the sampler has the engine's newest weights and may use the memory.

    A sampler that shares the engine's module has them already. To others the engine streams its
    weights, or its adapter alone, after they have changed. A sampler that checks its weights gets
    a probe, too: a few tokens with the engine's log-probs.
    """

    def __init__(
        self, engine: Engine, rollout: Rollout, free_cache: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is the precision in which the engine computes log-probs."""
        self._engine = engine
        self._rollout = rollout
        self._dtype = dtype
        self.shares_storage = not rollout.traits.owns_weights and rollout.module is engine.module
        """Both use one module: nothing is copied, and the engine's memory is the sampler's."""
        self.streams = not self.shares_storage and rollout.traits.takes_weights
        """The engine's weights, or its adapter alone, go over once after each update."""
        self.checks = self.streams and rollout.traits.checks_weights
        """The sampler must agree with the engine on the log-probs of a probe."""
        self.frees_cache = free_cache
        """The sampler gives its memory back after each batch; else it keeps it while the engine
        trains."""
        self._sent_version: int | None = None

    def update_weights(self) -> None:
        """Give the sampler the engine's newest weights, unless it has them."""
        version = self._engine.version
        if self.streams and self._sent_version != version:
            self._engine.onload()
            self._rollout.update(self._engine, version)
            if self.checks:
                self._rollout.expect(self._probe())
            self._engine.offload()
            self._rollout.synchronize()
        self._sent_version = self._rollout.version = version

    def _probe(self) -> Probe:
        """The engine's side. Ranks that share a model run it together, on the same tokens."""
        vocabulary = base_module(self._engine.module).config.vocab_size
        tokens = probe_tokens(vocabulary, self._rollout.config.longest_sequence)
        ids = torch.tensor([tokens])  # (1, T)
        row = DataProto.from_dict(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "responses": ids[:, 1:],
                "response_mask": torch.ones_like(ids[:, 1:]),
            }
        )
        plan = ForwardPlan(("log_probs",), by_tokens=False, micro_batch_size=1, max_tokens=None)
        log_probs = self._engine.infer(row, plan)["log_probs"]  # (1, T - 1)
        return Probe(tokens, log_probs[0].tolist(), self._dtype)

    def __enter__(self) -> None:
        self.update_weights()
        if self.shares_storage:
            self._engine.onload()
        self._rollout.wake_up()

    def __exit__(self, *error: object) -> None:
        if self.frees_cache:
            self._rollout.sleep()
        if self.shares_storage:
            self._engine.offload()
