"""What a GPU does differently: flash attention over packed tokens, half precision, offloading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from caldera.config import RolloutConfig
from caldera.demo.run import run_demo
from caldera.models.attention import ATTENTION, PackedSequences
from caldera.models.forward import hidden_states
from caldera.models.head import HeadOutput, full_kl, head_outputs
from caldera.rollout.base import Request, SamplingParams
from caldera.rollout.native.engine import NativeRollout

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def small_llama(dtype: torch.dtype) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


@pytest.mark.parametrize("lengths", [[7, 7, 7], [3, 65, 1, 30]])
def test_flash_and_rectangles_agree(lengths: list[int]) -> None:
    reference = small_llama(torch.float32).to(CUDA)
    half = small_llama(torch.bfloat16).to(CUDA)
    half.load_state_dict(reference.state_dict())
    packed = PackedSequences(lengths, CUDA)
    ids = torch.randint(0, 64, (1, sum(lengths)), device=CUDA)
    with torch.no_grad():
        want = hidden_states(reference, ids, packed.position_ids, packed)
        got = hidden_states(half, ids, packed.position_ids, packed)
    assert torch.nn.functional.cosine_similarity(want, got.float()).min() > 0.999


def test_cpu_and_gpu_sample_the_same_tokens() -> None:
    config = RolloutConfig(dtype="float32", max_model_len=64)
    params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9)
    requests = [Request([1, 2, 3 + i], params, seed=i) for i in range(16)]
    answers = []
    for device in (torch.device("cpu"), CUDA):
        sampler = NativeRollout(config, small_llama(torch.float32).to(device), device)
        sampler.wake_up()
        answers.append([completion.token_ids for completion in sampler.generate(requests)])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= 15  # rounding may flip a token that was nearly tied


@pytest.mark.parametrize("offload", [False, True])
def test_the_demo_learns_in_half_precision(tmp_path: Path, offload: bool) -> None:
    memory = "actor_rollout_ref.actor.fsdp_config"
    overrides = [
        "trainer.device=cuda",
        "trainer.total_training_steps=40",
        f"{memory}.param_offload={offload}",
        f"{memory}.optimizer_offload={offload}",
    ]
    run_demo("tiny", tmp_path / "demo", False, overrides)
    rows = [
        json.loads(line)["data"]
        for line in (tmp_path / "demo/run/metrics.jsonl").read_text().splitlines()
    ]
    accuracy = [v for row in rows for k, v in row.items() if k.startswith("val-core/")]
    assert accuracy[-1] > accuracy[0] + 0.1
    gaps = [row["training/rollout_probs_diff_mean"] for row in rows if len(row) > 10]
    assert max(gaps) < 0.02
    steps = [row for row in rows if "actor/pg_loss" in row]
    for name in ("perf/mfu/actor", "perf/mfu/actor_infer"):
        assert all(0 < row[name] < 1 for row in steps), name


def test_the_head_in_half_precision_agrees_with_the_dense_form() -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden, other = (
        torch.randn(50, 64, device=CUDA, generator=generator).bfloat16() for _ in range(2)
    )
    weight = (torch.randn(1000, 64, device=CUDA, generator=generator) / 8).bfloat16()
    labels = torch.randint(0, 1000, (50,), device=CUDA, generator=generator)
    names: tuple[HeadOutput, ...] = ("log_probs", "entropy", "sum_pi_squared")
    outputs = head_outputs(hidden, weight, labels, 1.0, names)
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    log_q = torch.log_softmax((other @ weight.t()).float(), -1)
    want = {
        "log_probs": log_p.gather(1, labels[:, None]).squeeze(1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "sum_pi_squared": log_p.exp().square().sum(-1),
    }
    for name in names:
        torch.testing.assert_close(outputs[name], want[name], rtol=1e-4, atol=1e-5)
    distance = full_kl(hidden, weight, other, weight, 1.0)
    torch.testing.assert_close(distance, (log_p.exp() * (log_p - log_q)).sum(-1))


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=gae"],
        [
            "algorithm.adv_estimator=optimal_token_baseline",
            "actor_rollout_ref.actor.calculate_sum_pi_squared=True",
        ],
        ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full"],
        ["algorithm.rollout_correction.preset=bypass_pg_is"],
    ],
)
def test_algorithms_run_on_a_gpu(tmp_path: Path, overrides: list[str]) -> None:
    steps = ["trainer.device=cuda", "trainer.total_training_steps=3", "trainer.test_freq=3"]
    run_demo("tiny", tmp_path / "demo", False, [*steps, *overrides])
    lines = (tmp_path / "demo/run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["data"] for line in lines]
    last = [row for row in rows if "actor/grad_norm" in row][-1]
    assert 0 < last["actor/grad_norm"] < float("inf")
    assert ("perf/mfu/critic" in last) == ("gae" in overrides[0])
