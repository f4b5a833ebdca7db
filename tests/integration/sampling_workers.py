"""Workers that sample together, in a module that their processes can import."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from caldera.config import RolloutConfig
from caldera.models.attention import ATTENTION
from caldera.models.pretrained import take_values
from caldera.rollout import Request, SamplingParams
from caldera.rollout.native.parallel.engine import TensorParallelRollout
from caldera.single_controller import Dispatch, Worker, register

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


class Sampling(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def sample(self, fate: str) -> None:
        """Rank 0 leads; in its third step rank 1 meets its fate."""
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(
            LlamaConfig(**SIZES), attn_implementation=ATTENTION
        )
        weights = take_values(module)
        config = RolloutConfig(max_model_len=64, tensor_model_parallel_size=2)
        rollout = TensorParallelRollout.join(config, module, torch.device("cpu"), 60.0)
        rollout.load_weights(weights.items(), 1)
        if rollout.leads:
            params = SamplingParams(max_tokens=32)
            with rollout.leading():
                rollout.generate([Request([1, 2, 3], params, seed) for seed in range(4)])
            return
        runs: list[None] = []
        run = rollout._runner.run

        def meet(*given: Any, **named: Any) -> Any:
            runs.append(None)
            if len(runs) == 3:
                if fate == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("no third step")
            return run(*given, **named)

        rollout._runner.run = meet  # type: ignore[method-assign]
        rollout.follow()
