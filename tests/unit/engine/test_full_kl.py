"""The distance to a reference over the whole vocabulary, against transformers on padded rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from caldera.config import FSDPConfig
from caldera.core_algos import LossScale, agg_loss
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.engine.packed_model import pack_rows
from caldera.models.loading import enable_checkpointing
from caldera.protocol import DataProto

Make = Callable[..., LocalEngine]
Build = Callable[..., PreTrainedModel]
TEMPERATURE = 0.7
CPU = torch.device("cpu")


def plan_for(reference: LocalEngine, rows: int = 2) -> ForwardPlan:
    return ForwardPlan(
        ("full_kl", "log_probs"), False, rows, None, TEMPERATURE, reference=reference
    )


def frozen(module: torch.nn.Module, **memory: Any) -> LocalEngine:
    return LocalEngine(module, CPU, EngineOptions(FSDPConfig(**memory)))


def log_probs(model: Any, rows: DataProto) -> Tensor:
    """(B, R, V), from transformers alone."""
    tensors = rows.batch
    width = tensors["response_mask"].shape[1]
    out = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"],
    )
    return (out.logits[:, -width - 1 : -1] / TEMPERATURE).log_softmax(-1)


def dense_kl(policy: Any, reference: Any, rows: DataProto) -> Tensor:
    log_p = log_probs(policy, rows)
    with torch.no_grad():
        log_q = log_probs(reference, rows)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return kl.masked_fill(rows.batch["response_mask"] == 0, 0)


def loss_fn(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = scale.aggregate(outputs["full_kl"], rows.batch["response_mask"], "token-mean")
    return loss, {"loss": loss.detach()}


@pytest.fixture
def doubles(tiny_model: Build) -> Callable[[int], PreTrainedModel]:
    """A model in float64, of a family that does not round to float32 on its way."""
    return lambda seed: tiny_model("starcoder2", seed=seed).double()


def with_adapter(model: PreTrainedModel) -> Any:
    """An adapter that already does something."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        adapted = peft.get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return adapted


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_values(make_engine: Make, tiny_model: Build, batch: DataProto, rows: int) -> None:
    reference = frozen(tiny_model("llama", seed=7))
    outputs = make_engine("llama").infer(batch, plan_for(reference, rows))
    assert outputs.keys() == {"full_kl", "log_probs"}
    models = [tiny_model("llama", seed=seed) for seed in (0, 7)]
    for model in models:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = dense_kl(models[0], models[1], batch)
    assert expected.max() > 0.1
    torch.testing.assert_close(outputs["full_kl"], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_step(
    make_engine: Make,
    doubles: Callable[[int], PreTrainedModel],
    batch: DataProto,
    checkpointing: bool,
) -> None:
    policy, reference = doubles(0), doubles(7)
    for model in (policy, reference):
        model.set_attn_implementation("sdpa")
    loss = agg_loss(dense_kl(policy, reference, batch), batch.batch["response_mask"], "token-mean")
    loss.backward()
    expected = {name: (p - p.grad).detach() for name, p in policy.named_parameters()}
    other = frozen(doubles(7))
    before = copy.deepcopy(other.module.state_dict())
    for rows in (1, 2, 6):
        module = doubles(0)
        if checkpointing:
            enable_checkpointing(module)
        engine = make_engine(module)
        metrics = engine.train(batch, loss_fn, plan_for(other, rows))
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in engine.module.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-12)
    after = other.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in other.module.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_step_with_an_adapter(
    make_engine: Make,
    doubles: Callable[[int], PreTrainedModel],
    batch: DataProto,
    checkpointing: bool,
) -> None:
    """The reference is the very module that is trained, less its adapter."""
    base, plain = doubles(0), with_adapter(doubles(0))
    for model in (base, plain.get_base_model()):
        model.set_attn_implementation("sdpa")
    loss = agg_loss(dense_kl(plain, base, batch), batch.batch["response_mask"], "token-mean")
    assert loss.item() > 0.01
    loss.backward()
    expected = {n: (p - p.grad).detach() for n, p in plain.named_parameters() if p.requires_grad}
    module = with_adapter(doubles(0))
    if checkpointing:
        enable_checkpointing(module)
    engine = make_engine(module)
    metrics = engine.train(batch, loss_fn, plan_for(engine))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    trained = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    assert trained.keys() == expected.keys()
    assert all("lora_" in name for name in trained)
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-12)


def test_the_reference_is_in_evaluation_mode(
    make_engine: Make, tiny_model: Build, batch: DataProto
) -> None:
    """No dropout and no adapter; afterwards the module trains on as it did."""
    module = with_adapter(tiny_model("starcoder2", residual_dropout=0.5))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    engine = make_engine(module)
    engine.module.train()
    packed = pack_rows(batch, CPU)
    states = [engine.frozen_states(packed).hidden for _ in range(2)]
    plain = frozen(tiny_model("starcoder2", residual_dropout=0.5))
    states.append(plain.frozen_states(packed).hidden)
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert not states[0].requires_grad
    assert all(part.training for part in module.modules())
    assert not any(part.training for part in plain.module.modules())
    assert trained == [n for n, parameter in module.named_parameters() if parameter.requires_grad]


def test_each_computes_in_its_own_precision(
    make_engine: Make, tiny_model: Build, batch: DataProto
) -> None:
    exact = make_engine().infer(batch, plan_for(frozen(tiny_model(seed=7))))["full_kl"]
    half = frozen(tiny_model(seed=7).bfloat16(), model_dtype="bf16")
    cast = frozen(tiny_model(seed=7), dtype="bfloat16")
    inside = batch.batch["response_mask"] == 1
    for reference in (half, cast):
        for memory in (FSDPConfig(), FSDPConfig(dtype="bfloat16")):
            engine = make_engine(memory=memory)
            rounded = engine.infer(batch, plan_for(reference))["full_kl"]
            assert rounded.dtype == torch.float32
            assert 0 < (rounded - exact)[inside].abs().mean() < 0.1 * exact[inside].mean()
            assert engine.train(batch, loss_fn, plan_for(reference))["grad_norm"] > 0


def test_the_distance_to_itself_is_nothing(
    make_engine: Make, tiny_model: Build, batch: DataProto
) -> None:
    for memory in (FSDPConfig(), FSDPConfig(dtype="bfloat16")):
        other = LocalEngine(tiny_model(), CPU, EngineOptions(memory))
        engine = make_engine(memory=memory)
        assert not engine.infer(batch, plan_for(other))["full_kl"].any()
        assert engine.train(batch, loss_fn, plan_for(other))["grad_norm"] == 0.0


def test_a_plan_needs_both_or_neither(make_engine: Make) -> None:
    with pytest.raises(AssertionError, match="one needs the other"):
        ForwardPlan(("full_kl",), False, 2, None)
    with pytest.raises(AssertionError, match="one needs the other"):
        replace(plan_for(make_engine()), outputs=("log_probs",))
