"""The native sampler on CUDA: its kernels, its captured steps, its exact mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from caldera.config import FSDPConfig, OptimizerConfig, RolloutConfig
from caldera.config.rollout import NativeRolloutConfig
from caldera.core_algos import LossScale
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.models.attention import ATTENTION
from caldera.protocol import DataProto, tensors_of
from caldera.rollout.base import Completion, Request, SamplingParams
from caldera.rollout.batch import completions_to_batch
from caldera.rollout.native.engine import NativeRollout

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**{**SIZES, "num_attention_heads": 4, "max_position_embeddings": 2048}),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=24),
}


def build(family: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = AutoModelForCausalLM.from_config(
        FAMILIES[family], dtype=dtype, attn_implementation=ATTENTION
    )
    return module.to(CUDA)


def sampler(module: nn.Module, dtype: str, exact: bool = False, **keys: Any) -> NativeRollout:
    own = NativeRolloutConfig(exact=exact)
    config = RolloutConfig(
        **{"dtype": dtype, "max_model_len": 256, "max_num_seqs": 16, "native": own, **keys}
    )
    rollout = NativeRollout(config, module, CUDA)
    rollout.wake_up()
    return rollout


def requests(count: int = 40, **keys: Any) -> list[Request]:
    return [
        Request(
            [(7 * i + j) % 1000 for j in range(1 + 3 * (i % 20))],
            SamplingParams(**{"max_tokens": 5 + i, "temperature": [0.0, 1.0, 0.7][i % 3], **keys}),
            seed=i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
        {"kv_cache_blocks": 40, "enable_prefix_caching": True},
    ],
)
def test_captured_steps_sample_what_plain_ones_do(family: str, keys: dict[str, Any]) -> None:
    module = build(family, torch.float32)
    work = [*requests(), *requests(6, top_k=20), *requests(3, repetition_penalty=1.2)]
    want = sampler(module, "float32", enforce_eager=True).generate(work)
    captured = sampler(module, "float32", **keys)
    for _ in range(2):
        got = captured.generate(work)
        same = [a.token_ids == b.token_ids for a, b in zip(got, want, strict=True)]
        assert sum(same) >= len(work) - 1  # rounding may flip a token that was nearly tied
        for one, other, is_same in zip(got, want, same, strict=True):
            if is_same:
                assert np.abs(np.subtract(one.log_probs, other.log_probs)).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "rows", "most"),
    [
        *(("qwen2", rows, 512) for rows in (3, 8, 16, 30, 64, 78)),
        ("qwen3", 78, 512),
        ("qwen2", 78, 0),  # products by cuBLAS, as those of larger models
        ("qwen3", 3, 0),
    ],
)
def test_pdl_steps(family: str, rows: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of PDL steps are those of the compiled layers."""
    from caldera.rollout.native.cuda import pdl_steps

    if not pdl_steps.supports_pdl(CUDA, torch.bfloat16):
        pytest.skip("this GPU runs the compiled layers")
    monkeypatch.setattr(pdl_steps, "MOST_IN_TILES", most)
    module = build(family, torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():  # biases begin as zeros
            parameter.add_(0.02 * torch.randn_like(parameter))
    keys: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": 1500}
    work = requests(70, ignore_eos=True)
    long = [(3 * i) % 1000 for i in range(1300)]  # some programs have several blocks of keys
    work += [Request(long[: 500 + 100 * i], SamplingParams(max_tokens=30), i) for i in range(8)]
    ours = sampler(module, "bfloat16", **keys)
    got = ours.generate(work)
    assert ours._runner._pdl_steps is not None  # type: ignore[attr-defined]
    assert [a.token_ids for a in ours.generate(work)] == [a.token_ids for a in got]
    monkeypatch.setattr(pdl_steps, "supports_pdl", lambda *_: False)
    want = sampler(module, "bfloat16", **keys).generate(work)
    compared, differences = 0, []
    for one, other in zip(got, want, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
        compared += same
        differences += np.abs(np.subtract(one.log_probs[:same], other.log_probs[:same])).tolist()
    assert compared > 0.5 * sum(len(answer.token_ids) for answer in got)
    assert np.mean(differences) < 0.01
    assert np.max(differences) < 0.1


def test_stops_and_aborts_while_a_step_is_under_way() -> None:
    module = build("llama", torch.float32)
    stops = frozenset(range(0, 1000, 10))
    work = requests(stop_token_ids=stops, max_tokens=100)
    want = sampler(module, "float32", enforce_eager=True).generate(work)
    got = sampler(module, "float32").generate(work)
    assert {answer.finish_reason for answer in got} == {"stop", "length"} or all(
        answer.finish_reason == "stop" for answer in got
    )
    same = sum(a.token_ids == b.token_ids for a, b in zip(got, want, strict=True))
    assert same >= len(work) - 1


def test_a_call_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an error came while a step was under way, or kept one from being run."""
    rollout = sampler(build("llama", torch.float32), "float32")
    want = [answer.token_ids for answer in rollout.generate(requests())]

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        rollout.generate(requests(), on_finished=fail)
    assert [answer.token_ids for answer in rollout.generate(requests())] == want
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="on purpose"):
        patched.setattr(torch.cuda.CUDAGraph, "replay", fail)
        rollout.generate(requests())
    assert [answer.token_ids for answer in rollout.generate(requests())] == want


def test_training_changes_what_is_sampled_without_a_copy() -> None:
    module = build("llama", torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    rollout = sampler(module, "bfloat16")
    before = torch.cuda.memory_allocated()
    first = rollout.generate(requests(temperature=0.0))
    rollout.sleep()
    assert torch.cuda.memory_allocated() - before < weights / 2
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rollout.version += 1
    rollout.wake_up()
    second = rollout.generate(requests(temperature=0.0))
    fresh = sampler(module, "bfloat16").generate(requests(temperature=0.0))
    assert [a.token_ids for a in second] != [a.token_ids for a in first]
    assert [a.token_ids for a in second] == [a.token_ids for a in fresh]


def test_weights_that_went_to_the_host_and_back() -> None:
    module = build("llama", torch.bfloat16)
    rollout = sampler(module, "bfloat16")
    want = rollout.generate(requests())
    for device in ("cpu", "cuda"):
        for parameter in module.parameters():
            parameter.data = parameter.data.to(device)
    got = rollout.generate(requests())
    assert [a.token_ids for a in got] == [a.token_ids for a in want]


# ---- exact mode


def rows_of(work: list[Request], answers: list[Completion]) -> DataProto:
    width = max(len(request.prompt_ids) for request in work)
    ids = torch.zeros(len(work), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(work):
        ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
    longest = max(len(answer.token_ids) for answer in answers)
    return completions_to_batch(prompts, answers, longest, 0, True)


def ratio_loss(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    tensors = tensors_of(rows)
    mask = tensors["response_mask"].bool()
    ratio = (outputs["log_probs"] - tensors["rollout_log_probs"]).exp()
    loss = scale.aggregate(-ratio, tensors["response_mask"], "token-mean")
    furthest = (ratio[mask] - 1).abs().max() if mask.any() else ratio.new_zeros(())
    return loss, {"furthest": furthest.detach()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_one(family: str, temperature: float) -> None:
    module = build(family, torch.bfloat16)
    memory = FSDPConfig(model_dtype="bf16", dtype="bfloat16")
    options = EngineOptions(memory, OptimizerConfig(lr=1e-3), 1.0)
    engine = LocalEngine(module, CUDA, options)
    work = requests(temperature=temperature, ignore_eos=True)
    keys = {"enable_chunked_prefill": True, "max_num_batched_tokens": 100}
    for own in ({}, keys, {"kv_cache_blocks": 40, "enable_prefix_caching": True}):
        rollout = sampler(module, "bfloat16", exact=True, **own)
        rollout.version = engine.version
        rows = rows_of(work, rollout.generate(work))
        for by_tokens, size, budget in ((False, 7, None), (True, 1, 2000)):
            plan = ForwardPlan(("log_probs",), by_tokens, size, budget, temperature)
            found = engine.infer(rows, plan)["log_probs"].cpu()
            assert torch.equal(found, tensors_of(rows)["rollout_log_probs"].cpu())
        metrics = engine.train(
            rows, ratio_loss, ForwardPlan(("log_probs",), False, 5, None, temperature)
        )
        assert float(metrics["furthest"]) == 0.0  # the sum over micro-batches
