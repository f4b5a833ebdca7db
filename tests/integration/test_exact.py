"""Exact mode: the log-probs of the sampler are those of the trainer, bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from caldera.config import FSDPConfig, OptimizerConfig, RolloutConfig
from caldera.config.rollout import NativeRolloutConfig
from caldera.demo import smollm2
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine
from caldera.errors import UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.models.head import HeadOutput
from caldera.protocol import DataProto
from caldera.rollout import HFRollout, NativeRollout, Request, SamplingParams
from caldera.rollout.base import Completion
from caldera.rollout.batch import completions_to_batch

CPU = torch.device("cpu")
PROMPT, RESPONSE = 96, 24
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
WINDOWED: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
FAMILIES: dict[str, Callable[[], tuple[type[PreTrainedModel], Any]]] = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "gemma3": lambda: (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **WINDOWED)),
}
LOG_PROBS: tuple[HeadOutput, ...] = ("log_probs",)


def build(family: str) -> PreTrainedModel:
    kind, config = FAMILIES[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind._from_config(config, attn_implementation=ATTENTION)


def config(**keys: Any) -> RolloutConfig:
    native = NativeRolloutConfig(exact=True)
    return RolloutConfig(
        **{"prompt_length": PROMPT, "response_length": RESPONSE, "native": native, **keys}
    )


def as_batch(requests: list[Request], completions: list[Completion]) -> DataProto:
    ids = torch.zeros(len(requests), PROMPT, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        start = PROMPT - len(request.prompt_ids)
        ids[row, start:] = torch.tensor(request.prompt_ids)
        mask[row, start:] = 1
    prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
    return completions_to_batch(prompts, completions, RESPONSE, 0, calculate_log_probs=True)


def rollout_log_probs(batch: DataProto) -> Tensor:
    assert batch.batch is not None
    found = batch.batch["rollout_log_probs"]
    assert isinstance(found, Tensor)
    return found


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_schedule_and_any_split_give_the_same_bits(data: st.DataObject) -> None:
    """Turns of conversations, any limits of the sampler, any micro-batches, changing weights."""
    module = build(data.draw(st.sampled_from(sorted(FAMILIES))))
    keys = {
        "enable_prefix_caching": data.draw(st.booleans()),
        "enable_chunked_prefill": data.draw(st.booleans()),
        "max_num_batched_tokens": data.draw(st.sampled_from([7, 33, 8192])),
        "max_num_seqs": data.draw(st.sampled_from([1, 3, 256])),
        "kv_cache_blocks": data.draw(st.sampled_from([None, 9])),
    }
    rollout = NativeRollout(config(**keys), module, CPU)
    engine = LocalEngine(module, CPU, EngineOptions(FSDPConfig()))
    temperature = data.draw(st.sampled_from([1.0, 0.7]))
    starts = [[seed + 1] * length for seed, length in enumerate((2, 17, 40))]
    for turn in range(2):
        chosen = data.draw(st.lists(st.sampled_from(range(3)), min_size=1, max_size=6))
        requests = [
            Request(starts[i], SamplingParams(3 + 4 * n, temperature), 10 * turn + n)
            for n, i in enumerate(chosen)
        ]
        completions = rollout.generate(requests)
        batch = as_batch(requests, completions)
        by_tokens, size = data.draw(st.booleans()), data.draw(st.integers(1, 6))
        budget = (PROMPT + RESPONSE) * size  # any sequence fits
        plan = ForwardPlan(LOG_PROBS, by_tokens, size, budget, temperature)
        assert torch.equal(engine.infer(batch, plan)["log_probs"], rollout_log_probs(batch))
        for i, completion in zip(chosen, completions, strict=True):
            starts[i] = [*starts[i], *completion.token_ids][:72]
        if data.draw(st.booleans()):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.97)
            rollout.version += 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_first_step_of_training_has_a_ratio_of_one(checkpointing: bool) -> None:
    """Also after that step, with the weights that it left."""
    module = build("llama")
    rollout = NativeRollout(config(), module, CPU)
    optim = OptimizerConfig(optimizer="SGD", lr=0.1, weight_decay=0.0)
    options = EngineOptions(FSDPConfig(), optim, gradient_checkpointing=checkpointing)
    engine = LocalEngine(module, CPU, options)
    requests = [Request([seed + 1] * (5 * seed + 1), SamplingParams(20), seed) for seed in range(6)]
    for step in range(2):
        batch = as_batch(requests, rollout.generate(requests))
        ratios: list[Tensor] = []

        def loss(outputs: Any, rows: DataProto, scale: Any, kept: list[Tensor] = ratios) -> Any:
            ratio = (outputs["log_probs"] - rollout_log_probs(rows)).exp()
            kept.append(ratio.detach())
            return -ratio.mean(), {}

        engine.train(batch, loss, ForwardPlan(LOG_PROBS, False, 4, None))
        rollout.version = engine.version
        assert [len(ratio) for ratio in ratios] == [4, 2]
        assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios), step


def test_gradients_are_those_of_ordinary_training() -> None:
    def gradients(exact: bool) -> list[Tensor]:
        module = build("llama")
        if exact:
            NativeRollout(config(), module, CPU)
        optim = OptimizerConfig(optimizer="SGD", lr=1.0, weight_decay=0.0)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        engine = LocalEngine(module, CPU, EngineOptions(FSDPConfig(), optim))
        requests = [Request([3, 4, 5 + row], SamplingParams(9), row) for row in range(5)]
        completions = [Completion([7, row + 1, 9], [0.0] * 3, "stop", 0) for row in range(5)]
        plan = ForwardPlan(LOG_PROBS, False, 2, None)

        def loss(outputs: Any, rows: DataProto, scale: Any) -> Any:
            return -outputs["log_probs"].sum() / 15, {}

        engine.train(as_batch(requests, completions), loss, plan)
        after = module.parameters()
        return [new.detach() - old for new, old in zip(after, before, strict=True)]

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_another_precision_or_sampler_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"exact=True with .*rollout.dtype=bfloat16"):
        NativeRollout(config(dtype="bfloat16"), build("llama"), CPU)
    with pytest.raises(UnsupportedError, match=r"exact=True.*rollout.name=native"):
        HFRollout(config(), build("llama"), CPU)
    module = build("llama")
    NativeRollout(config(), module, CPU)
    engine = LocalEngine(module, CPU, EngineOptions(FSDPConfig(dtype="bfloat16")))
    requests = [Request([3, 4], SamplingParams(3), 0)]
    batch = as_batch(requests, [Completion([5], [0.0], "stop", 0)])
    with pytest.raises(UnsupportedError, match=r"exact=True: fsdp_config.dtype"):
        engine.infer(batch, ForwardPlan(LOG_PROBS, False, 1, None))


@pytest.mark.slow
@pytest.mark.skipif(
    not smollm2.default_folder().is_dir()
    and not all(map(importlib.util.find_spec, [smollm2.PACKAGE, "gguf"])),
    reason=f"SmolLM2 is not installed: {smollm2.INSTALL}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_model(dtype: torch.dtype) -> None:
    module = AutoModelForCausalLM.from_pretrained(
        smollm2.materialise(), dtype=dtype, attn_implementation=ATTENTION
    )
    rollout = NativeRollout(config(max_num_seqs=3), module, CPU)
    requests = [
        Request(list(range(100, 110 + 9 * row)), SamplingParams(4 + 3 * row), row)
        for row in range(5)
    ]
    batch = as_batch(requests, rollout.generate(requests))
    engine = LocalEngine(
        module, CPU, EngineOptions(FSDPConfig(model_dtype=str(dtype).partition(".")[2]))
    )
    for size in (2, 5):
        found = engine.infer(batch, ForwardPlan(LOG_PROBS, False, size, None))["log_probs"]
        assert torch.equal(found, rollout_log_probs(batch))
