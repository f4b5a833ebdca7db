"""The engine on a GPU: nothing waits inside a step, and compiling changes rounding alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from caldera.config import FSDPConfig, ModelConfig, OptimizerConfig
from caldera.core_algos import LossScale
from caldera.engine import Engine, EngineOptions, ForwardPlan, Outputs
from caldera.models.loading import DTYPES, build_policy
from caldera.protocol import DataProto, tensors_of
from caldera.workers.building import build_engine

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PLAN = ForwardPlan(("log_probs", "entropy"), True, None, 64)
P, R = 4, 28


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen2Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=500, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def batch_of(seed: int) -> DataProto:
    """Eight rows, whose lengths are others for every seed."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(1, R + 1, (8,), generator=generator)
    mask = (torch.arange(R) < answers[:, None]).long()
    ids = torch.randint(1, 500, (8, P + R), generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "responses": ids[:, P:],
            "attention_mask": torch.cat([torch.ones(8, P, dtype=torch.long), mask], 1),
            "response_mask": mask,
            "advantages": torch.randn(8, R, generator=generator),
        }
    )


def loss_fn(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    tensors = tensors_of(rows)
    mask = tensors["response_mask"]
    gain = outputs["log_probs"] * tensors["advantages"] + 0.01 * outputs["entropy"]
    loss = scale.aggregate(-gain, mask, "token-mean")
    return loss, {"loss": loss.detach()}


def make(folder: Path, strategy: str = "local", **options: Any) -> Engine:
    memory = options.pop("memory", FSDPConfig(dtype="bfloat16"))
    model = ModelConfig(path=str(folder), use_liger=options.pop("use_liger", False))
    told = EngineOptions(memory, OptimizerConfig(lr=1e-3), 1.0, **options)

    def build(empty: bool) -> Any:
        return build_policy(model, DTYPES[memory.model_dtype], 0, "model", empty)

    return build_engine(strategy, build, CUDA, told)


def curve(engine: Engine, steps: int = 4) -> Tensor:
    """Losses and gradient norms, (steps, 2)."""
    found = [engine.train(batch_of(seed), loss_fn, PLAN) for seed in range(steps)]
    return torch.stack([torch.stack([m["loss"], m["grad_norm"]]) for m in found]).float().cpu()


@pytest.mark.parametrize("compiles", [False, True])
def test_nothing_waits_for_the_gpu(folder: Path, compiles: bool) -> None:
    engine = make(folder, compiles=compiles)
    batches = [batch_of(seed) for seed in range(3)]
    for batch in batches:  # kernels are built, and memory is allocated
        engine.train(batch, loss_fn, PLAN)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            engine.train(batch, loss_fn, PLAN)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [
        {"compiles": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "compiles": True},
        {"activation_offload": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_switches_change_rounding_alone(folder: Path, options: dict[str, Any]) -> None:
    plain, switched = curve(make(folder)), curve(make(folder, **options))
    torch.testing.assert_close(switched, plain, rtol=2e-2, atol=2e-3)


def test_compiled_layers_take_any_lengths(folder: Path) -> None:
    """Without compiling anew for each: what is compiled is one graph, or two."""
    torch._dynamo.reset()
    engine = make(folder, compiles=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for seed in range(12):
            engine.train(batch_of(seed), loss_fn, PLAN)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] <= 16, frames


def test_a_gradient_that_is_not_finite(folder: Path) -> None:
    def broken(outputs: Outputs, rows: DataProto, scale: LossScale) -> Any:
        loss, metrics = loss_fn(outputs, rows, scale)
        return loss * float("nan"), metrics

    engine = make(folder)
    before = {name: value.clone() for name, value in engine.export_weights()}
    metrics = engine.train(batch_of(0), broken, PLAN)
    assert metrics["grad_norm"].isnan()
    assert all(torch.equal(value, before[name]) for name, value in engine.export_weights())
    torch.testing.assert_close(curve(engine), curve(make(folder)), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["fsdp2"])
def test_parameters_that_stay_on_the_host(folder: Path, alone: None, strategy: str) -> None:
    expected = curve(make(folder))
    memory = FSDPConfig(dtype="bfloat16", offload_policy=True)
    engine = make(folder, strategy, memory=memory)
    assert not engine.is_whole
    torch.testing.assert_close(curve(engine), expected, rtol=2e-2, atol=2e-3)
    assert all(p.device.type == "cpu" for p in engine.module.parameters())


def test_parameters_and_optimiser_go_and_come_back(folder: Path) -> None:
    memory = FSDPConfig(dtype="bfloat16", param_offload=True, optimizer_offload=True)
    engine, expected = make(folder, memory=memory), curve(make(folder))
    found = []
    for seed in range(4):
        engine.onload(optimizer=True)
        metrics = engine.train(batch_of(seed), loss_fn, PLAN)
        engine.offload()
        assert all(p.device.type == "cpu" for p in engine.module.parameters())
        found.append(torch.stack([metrics["loss"], metrics["grad_norm"]]))
    torch.testing.assert_close(torch.stack(found).float().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_ligers_kernels(folder: Path) -> None:
    pytest.importorskip("liger_kernel")
    torch.testing.assert_close(
        curve(make(folder, use_liger=True)), curve(make(folder)), rtol=2e-2, atol=2e-3
    )
