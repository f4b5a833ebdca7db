"""Training on pairs of rows, against transformers on padded rows, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from caldera.config import FSDPConfig, ModelConfig
from caldera.core_algos import LossScale, bradley_terry_loss
from caldera.engine import ForwardPlan, LocalEngine, Outputs
from caldera.models.loading import build_sequence_classifier, enable_checkpointing
from caldera.protocol import DataProto

Make = Callable[..., LocalEngine]
PLAN = ForwardPlan(("scores",), True, None, 1000, rows_together=2)
PLANS = {
    **{f"{n} rows": replace(PLAN, by_tokens=False, micro_batch_size=n) for n in (2, 4, 6)},
    **{f"{n} tokens": replace(PLAN, max_tokens=n) for n in (20, 30, 1000)},
}
ANSWERS = [6, 4, 1, 3, 3, 5]  # tokens of each row's answer


@pytest.fixture
def pairs(batch: DataProto) -> DataProto:
    """Three pairs of rows, all of which have an answer."""
    tensors = batch.batch
    width = tensors["responses"].shape[1]
    mask = (torch.arange(width) < torch.tensor(ANSWERS)[:, None]).long()
    attention = tensors["attention_mask"].clone()
    attention[:, -width:] = mask
    tensors["attention_mask"], tensors["response_mask"] = attention, mask
    tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return batch


def loss_fn(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    scores = outputs["scores"].sum(1)  # (2n,)
    losses, metrics = bradley_terry_loss(scores[::2], scores[1::2])
    told = {name: scale.group_mean(value, 2) for name, value in metrics.items()}
    return scale.group_mean(losses, 2), told


def classifier(folder: str, **keys: Any) -> Any:
    config = ModelConfig(path=folder, **keys)
    return build_sequence_classifier(config, torch.float32, 3, "model").module.double()


def on_padded_rows(model: Any, rows: DataProto) -> Tensor:
    """Scores (B,), from transformers alone, each row without its padding."""
    model.set_attn_implementation("sdpa")
    tensors = rows.batch
    scores = []
    for ids, attention in zip(tensors["input_ids"], tensors["attention_mask"], strict=True):
        backbone = model.model(ids[attention.bool()][None]).last_hidden_state  # (1, T, H)
        scores.append(model.score(backbone[0, -1]))
    return torch.cat(scores)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_step_whatever_the_micro_batches(
    make_engine: Make, model_folder: Callable[..., str], pairs: DataProto, plan: ForwardPlan
) -> None:
    model = classifier(model_folder("starcoder2"))
    scores = on_padded_rows(model, pairs)
    differences = scores[[0, 2, 4]] - scores[[1, 3, 5]]
    loss = -logsigmoid(differences).mean()
    loss.backward()
    expected = {name: (p - p.grad).detach() for name, p in model.named_parameters()}
    assert model.score.weight.grad.abs().max() > 1e-3
    engine = make_engine(classifier(model_folder("starcoder2")))
    metrics = engine.train(pairs, loss_fn, plan)
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected[name], rtol=1e-12, atol=1e-12, msg=name
        )
    assert metrics["margin"].item() == pytest.approx(differences.mean().item(), rel=1e-9)
    assert metrics["accuracy"].item() == pytest.approx((differences > 0).double().mean().item())


def test_checkpointing_and_adapters_do_not_cut_the_gradient(
    make_engine: Make, model_folder: Callable[..., str], pairs: DataProto
) -> None:
    module = classifier(model_folder(), lora_rank=2)
    enable_checkpointing(module)
    engine = make_engine(module)
    before = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    engine.train(pairs, loss_fn, PLAN)
    moved = {
        name
        for name, p in module.named_parameters()
        if name in before and (p != before[name]).any()
    }
    # The adapter's second half starts at 0, so that no gradient reaches the first one yet.
    assert {name for name in before if ".lora_B." in name} | {
        name for name in before if ".score." in name
    } == moved


def test_scores_keep_their_digits_where_the_rest_computes_in_bfloat16(
    make_engine: Make, model_folder: Callable[..., str], pairs: DataProto
) -> None:
    built = build_sequence_classifier(
        ModelConfig(path=model_folder()), torch.float32, 3, "model"
    ).module
    precise = make_engine(built).infer(pairs, PLAN)["scores"].sum(1)
    engine = make_engine(built, FSDPConfig(dtype="bfloat16"))
    scores = engine.infer(pairs, PLAN)["scores"].sum(1)
    assert (scores != scores.bfloat16()).any()
    assert not torch.equal(scores, precise)
    torch.testing.assert_close(scores, precise, rtol=0.1, atol=0.05)
