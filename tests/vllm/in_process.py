"""Run by a Python that has vLLM: Caldera and the engine in one process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from caldera.config import RolloutConfig
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS, Completion, Request, SamplingParams
from caldera.rollout.engines.rollout import EngineRollout
from caldera.rollout.engines.weights import ModuleWeights
from caldera.rollout.weights import probe_module

CPU = torch.device("cpu")
LENGTHS: dict[str, Any] = {"prompt_length": 16, "response_length": 32, "dtype": "float32"}


def main() -> None:
    config = LlamaConfig(
        vocab_size=199, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()
    rollout = ROLLOUTS["vllm"](RolloutConfig(name="vllm", max_num_seqs=8, **LENGTHS), model, CPU)
    assert isinstance(rollout, EngineRollout) and rollout.pids == []
    compare(rollout, model, 0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    rollout.update(ModuleWeights(model), 1)
    rollout.expect(probe_module(model, CPU, 48))
    rollout.sleep()
    rollout.wake_up()
    compare(rollout, model, 1)
    rollout.close()


def compare(rollout: EngineRollout, model: torch.nn.Module, version: int) -> None:
    params = SamplingParams(16, temperature=0.0, ignore_eos=True)
    requests = [Request([5 + n, 6], params, n) for n in range(3)]
    ours = rollout.generate(requests)
    theirs = ROLLOUTS["native"](RolloutConfig(**LENGTHS), model, CPU).generate(requests)
    assert tokens(ours) == tokens(theirs)
    assert {number for each in ours for number in each.token_versions()} == {version}


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [each.token_ids for each in completions]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
