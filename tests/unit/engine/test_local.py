"""The engine of one process, against transformers on padded rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from caldera.config import FSDPConfig, OptimizerConfig
from caldera.config.optim import WrapPolicyConfig
from caldera.core_algos import LOSS_AGG_MODES, LossScale, agg_loss
from caldera.engine import ENGINES, EngineOptions, ForwardPlan, LocalEngine, LossFn, Outputs
from caldera.engine.packed_model import PackedModel
from caldera.engine.sharded import units
from caldera.models.attention import ATTENTION
from caldera.models.loading import enable_checkpointing
from caldera.protocol import DataProto

Make = Callable[..., LocalEngine]
Build = Callable[..., PreTrainedModel]
TEMPERATURE = 0.7
PLAN = ForwardPlan(("log_probs", "entropy"), True, None, 1000, TEMPERATURE)
PLANS = {
    **{f"{n} rows": replace(PLAN, by_tokens=False, micro_batch_size=n) for n in (1, 2, 3, 6)},
    **{f"{n} tokens": replace(PLAN, max_tokens=n) for n in (11, 20, 1000)},
}


def on_padded_rows(model: PreTrainedModel, rows: DataProto, attention: str) -> list[Tensor]:
    """Log-probs and entropy (B, R) from transformers alone, zero outside the mask."""
    model.set_attn_implementation(attention)
    tensors = rows.batch
    width = tensors["response_mask"].shape[1]
    out = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"],
    )
    log_p = (out.logits[:, -width - 1 : -1] / TEMPERATURE).log_softmax(-1)  # (B, R, V)
    chosen = log_p.gather(2, tensors["responses"][:, :, None]).squeeze(2)
    entropy = -(log_p.exp() * log_p).sum(-1)
    outside = tensors["response_mask"] == 0
    return [chosen.masked_fill(outside, 0), entropy.masked_fill(outside, 0)]


def objective(outputs: list[Tensor], rows: DataProto) -> Tensor:
    """Loss of each token (B, R)."""
    advantages = rows.batch["advantages"].to(outputs[0].dtype)
    return -advantages * outputs[0] - 0.1 * outputs[1]


def loss_of(mode: str) -> LossFn:
    def loss_fn(
        outputs: Outputs, rows: DataProto, scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        matrix = objective([outputs["log_probs"], outputs["entropy"]], rows)
        loss = scale.aggregate(matrix, rows.batch["response_mask"], mode)
        return loss, {"loss": loss.detach()}

    return loss_fn


def parameters(engine: LocalEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3"])
def test_infer_is_a_forward_on_padded_rows(
    make_engine: Make, tiny_model: Build, batch: DataProto, family: str, plan: ForwardPlan
) -> None:
    outputs = make_engine(family).infer(batch, plan)
    with torch.no_grad():
        log_probs, entropy = on_padded_rows(tiny_model(family), batch, "eager")
    torch.testing.assert_close(outputs["log_probs"], log_probs, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(outputs["entropy"], entropy, rtol=1e-4, atol=2e-5)
    outside = batch.batch["response_mask"] == 0
    assert (outputs["log_probs"][outside] == 0).all()
    assert not outputs["log_probs"].requires_grad


def test_only_what_is_asked_for_is_computed(make_engine: Make, batch: DataProto) -> None:
    outputs = make_engine().infer(batch, ForwardPlan(("log_probs",), False, 2, None))
    assert outputs.keys() == {"log_probs"}


def test_sum_of_squared_probabilities(
    make_engine: Make, tiny_model: Build, batch: DataProto
) -> None:
    plan = replace(PLANS["2 rows"], outputs=("sum_pi_squared",))
    outputs = make_engine().infer(batch, plan)
    assert outputs.keys() == {"sum_pi_squared"}
    model = tiny_model()
    model.set_attn_implementation("eager")
    tensors = batch.batch
    with torch.no_grad():
        logits = model(
            tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
        ).logits[:, -7:-1]  # (B, R, V)
    expected = (logits / TEMPERATURE).softmax(-1).square().sum(-1)
    expected = expected.masked_fill(tensors["response_mask"] == 0, 0)
    torch.testing.assert_close(outputs["sum_pi_squared"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_one_step_whatever_the_micro_batches(
    make_engine: Make, tiny_model: Build, batch: DataProto, mode: str
) -> None:
    """In float64, against the gradient of the whole mini-batch on padded rows."""
    model = tiny_model("starcoder2").double()
    outputs = on_padded_rows(model, batch, "sdpa")
    loss = agg_loss(objective(outputs, batch), batch.batch["response_mask"], mode)
    loss.backward()
    expected = {name: (p - p.grad).detach() for name, p in model.named_parameters()}
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    for plan in PLANS.values():
        engine = make_engine(tiny_model("starcoder2").double())
        metrics = engine.train(batch, loss_of(mode), plan)
        assert_equal(expected, parameters(engine), tolerance=1e-12)
        assert metrics == pytest.approx({"loss": loss.item(), "grad_norm": norm}, rel=1e-12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_step_in_float32(make_engine: Make, batch: DataProto, family: str) -> None:
    optim = OptimizerConfig(optimizer="SGD", lr=0.1)
    stepped = []
    for plan in PLANS.values():
        engine = make_engine(family, optim=optim)
        engine.train(batch, loss_of("token-mean"), plan)
        stepped.append(parameters(engine))
    for other in stepped[1:]:
        assert_equal(stepped[0], other, tolerance=2e-6)


def test_tool_tokens_and_padding_have_no_gradient(make_engine: Make, batch: DataProto) -> None:
    """What stands where the response mask is 0 changes nothing but what follows it."""
    changed = copy.deepcopy(batch)
    padding = changed.batch["attention_mask"] == 0
    changed.batch["input_ids"][padding] = 7
    changed.batch["advantages"] *= 1 + (changed.batch["response_mask"] == 0)
    stepped = []
    for rows in (batch, changed):
        engine = make_engine()
        engine.train(rows, loss_of("token-mean"), PLANS["2 rows"])
        stepped.append(parameters(engine))
    assert_equal(stepped[0], stepped[1])


def test_rows_without_answer(make_engine: Make, batch: DataProto) -> None:
    silent = batch.select_idxs([3, 3])
    engine = make_engine()
    before = parameters(engine)
    outputs = engine.infer(silent, PLANS["1 rows"])
    assert outputs["log_probs"].tolist() == [[0.0] * 6] * 2
    metrics = engine.train(silent, loss_of("token-mean"), PLANS["1 rows"])
    assert metrics == {"loss": 0.0, "grad_norm": 0.0}
    assert_equal(before, parameters(engine))


def test_gradients_are_clipped(make_engine: Make, batch: DataProto) -> None:
    moved, norms = [], []
    for grad_clip in (0.0, 0.5, 1e9):
        engine = make_engine(grad_clip=grad_clip)
        before = parameters(engine)
        norms.append(engine.train(batch, loss_of("token-mean"), PLAN)["grad_norm"].item())
        after = parameters(engine)
        moved.append(torch.cat([(after[name] - before[name]).flatten() for name in before]))
    assert norms[0] == norms[1] == norms[2] > 1
    assert moved[0].norm().item() == pytest.approx(norms[0], rel=1e-5)
    torch.testing.assert_close(moved[1], moved[0] * (0.5 / norms[0]), rtol=1e-3, atol=1e-6)
    assert torch.equal(moved[0], moved[2])


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(
    make_engine: Make, batch: DataProto
) -> None:
    def broken(
        outputs: Outputs, rows: DataProto, scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return outputs["log_probs"].sum() * math.nan, {}

    engine = make_engine(optim=OptimizerConfig(lr=0.1), grad_clip=1.0)
    before = parameters(engine)
    metrics = engine.train(batch, broken, PLAN)
    assert math.isnan(metrics["grad_norm"])
    assert_equal(before, parameters(engine))
    engine.train(batch, loss_of("token-mean"), PLAN)
    fresh = make_engine(optim=OptimizerConfig(lr=0.1), grad_clip=1.0)
    fresh.train(batch, loss_of("token-mean"), PLAN)
    assert_equal(parameters(fresh), parameters(engine))


def test_gradient_checkpointing_gives_the_same_step(
    make_engine: Make, tiny_model: Build, batch: DataProto
) -> None:
    stepped = []
    for checkpointing in (False, True):
        model = tiny_model("starcoder2").double()
        if checkpointing:
            enable_checkpointing(model)
        engine = make_engine(model)
        engine.train(batch, loss_of("token-mean"), PLANS["2 rows"])
        stepped.append(parameters(engine))
    assert_equal(stepped[0], stepped[1], tolerance=1e-13)


def test_values(make_engine: Make, batch: DataProto, model_folder: Callable[..., str]) -> None:
    options: dict[str, Any] = {"num_labels": 1, "attn_implementation": ATTENTION}
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(model_folder(), **options).eval()
    engine = make_engine(copy.deepcopy(model))
    plan = ForwardPlan(("values",), False, 2, None)
    values = engine.infer(batch, plan)["values"]
    model.set_attn_implementation("eager")
    tensors = batch.batch
    with torch.no_grad():
        scores = model(
            tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
        ).logits[:, -7:-1, 0]
    expected = scores.masked_fill(tensors["response_mask"] == 0, 0)
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)

    def loss_fn(
        outputs: Outputs, rows: DataProto, scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = (outputs["values"] - 1).square()
        return scale.aggregate(error, rows.batch["response_mask"], "token-mean"), {}

    engine = make_engine(model, optim=OptimizerConfig(lr=0.01))
    model.set_attn_implementation(ATTENTION)
    for _ in range(20):
        engine.train(batch, loss_fn, plan)
    inside = batch.batch["response_mask"] == 1
    trained = engine.infer(batch, plan)["values"][inside]
    assert (trained - 1).abs().mean() < 0.5 * (values[inside] - 1).abs().mean()


def test_computing_in_bfloat16(make_engine: Make, batch: DataProto) -> None:
    memory = FSDPConfig(dtype="bfloat16")
    exact = make_engine().infer(batch, PLAN)["log_probs"]
    engine = make_engine(memory=memory)
    rounded = engine.infer(batch, PLAN)["log_probs"]
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.3
    metrics = engine.train(batch, loss_of("token-mean"), PLANS["2 rows"])
    reference = make_engine().train(batch, loss_of("token-mean"), PLANS["2 rows"])
    assert metrics["grad_norm"].item() == pytest.approx(reference["grad_norm"].item(), rel=0.1)
    assert next(engine.module.parameters()).dtype == torch.float32


def test_parameters_in_bfloat16(make_engine: Make, tiny_model: Build, batch: DataProto) -> None:
    memory = FSDPConfig(model_dtype="bf16")
    engine = make_engine(tiny_model().bfloat16(), memory, OptimizerConfig(lr=0.01))
    before = parameters(engine)
    assert torch.isfinite(engine.infer(batch, PLAN)["log_probs"]).all()
    engine.train(batch, loss_of("token-mean"), PLAN)
    after = parameters(engine)
    assert {p.dtype for p in after.values()} == {torch.bfloat16}
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_offloading_on_a_cpu_changes_nothing(make_engine: Make, batch: DataProto) -> None:
    stepped = []
    for offload in (False, True):
        memory = FSDPConfig(param_offload=offload, optimizer_offload=offload)
        engine = make_engine(memory=memory, optim=OptimizerConfig(lr=0.01))
        for _ in range(2):
            engine.offload()
            engine.onload(optimizer=True)
            engine.train(batch, loss_of("token-mean"), PLAN)
        engine.offload()
        stepped.append(parameters(engine))
    assert_equal(stepped[0], stepped[1])


def test_without_an_optimiser_the_model_is_frozen(tiny_model: Build, batch: DataProto) -> None:
    engine = LocalEngine(tiny_model(), torch.device("cpu"), EngineOptions(FSDPConfig()))
    assert not any(p.requires_grad for p in engine.module.parameters())
    assert engine.infer(batch, PLAN)["log_probs"].shape == (6, 6)
    with pytest.raises(AssertionError, match="frozen"):
        engine.train(batch, loss_of("token-mean"), PLAN)


def test_modes_of_the_module(make_engine: Make, batch: DataProto) -> None:
    engine = make_engine()
    modes = []

    def loss_fn(
        outputs: Outputs, rows: DataProto, scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        modes.append(engine.module.training)
        return outputs["log_probs"].sum(), {}

    engine.train(batch, loss_fn, PLAN)
    assert modes == [True]
    assert engine.module.training is False


def test_the_schedule_advances_by_training_steps(make_engine: Make, batch: DataProto) -> None:
    optim = OptimizerConfig(optimizer="SGD", lr=2.0, lr_warmup_steps=2)
    engine = make_engine(optim=optim)
    before = parameters(engine)
    engine.train(batch, loss_of("token-mean"), PLAN)
    assert_equal(before, parameters(engine))  # the first rate of a warm-up is 0
    assert [engine.step_schedule() for _ in range(4)] == [0.0, 1.0, 2.0, 2.0]


def test_weights_are_exported_under_their_names(make_engine: Make) -> None:
    engine = make_engine("qwen2")
    assert dict(engine.export_weights()).keys() == engine.module.state_dict().keys()


def test_the_registry_has_it() -> None:
    assert ENGINES.names() == ["fsdp", "fsdp2", "local", "megatron"]


def test_a_weight_that_the_head_shares_is_no_part_of_its_own(tiny_model: Build) -> None:
    """It would be sharded twice, and trained apart."""
    tied = tiny_model("llama", tie_word_embeddings=True)
    memory = FSDPConfig(wrap_policy=WrapPolicyConfig(min_num_params=1))
    parts = units(PackedModel(tied), EngineOptions(memory))
    assert parts and tied.get_input_embeddings() not in parts
    apart = tiny_model("llama", tie_word_embeddings=False)
    assert apart.get_input_embeddings() in units(PackedModel(apart), EngineOptions(memory))
