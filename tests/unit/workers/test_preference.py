"""Objectives of pairs in the supervised worker, against transformers on one row at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from caldera.config.loader import SCHEMAS, load_supervised_config
from caldera.config.sft import resolve_supervised
from caldera.core_algos import LossScale
from caldera.errors import DataError
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.workers.preference import DIRECT, REWARD_MODEL, pair_batch
from caldera.workers.supervised import Objective, SupervisedWorker

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}Z{% endif %}"
)
PAIRS: list[dict[str, Any]] = [
    {"prompt": "AB", "chosen": "CDE", "rejected": "F", "margin": 0.5},
    {"prompt": "G", "chosen": "H", "rejected": "IJKL", "margin": 0.0},
    {"prompt": "MNOPQ", "chosen": "RS", "rejected": "TU", "margin": 1.0},
    {"prompt": "A", "chosen": "", "rejected": "AB", "margin": 0.25},
]
BETA = 0.4
RATE = 0.5
Load = Callable[..., Any]


@pytest.fixture
def load(model_folder: Callable[..., str], tmp_path: Path) -> Load:
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(PAIRS))

    def make(name: str, *overrides: str) -> Any:
        given = [
            f"data.train_files={file}",
            "data.train_batch_size=4",
            "data.micro_batch_size_per_gpu=3",
            f"model.partial_pretrain={model_folder('qwen2')}",
            "model.enable_gradient_checkpointing=False",
            "optim.optimizer=SGD",
            "optim.override_optimizer_config=null",
            f"optim.lr={RATE}",
            "optim.lr_warmup_steps_ratio=0",
            "optim.lr_scheduler=constant",
            "optim.weight_decay=0",
            "optim.clip_grad=0",
            "trainer.seed=5",
            *overrides,
        ]
        schema: Any = SCHEMAS[name]
        config = load_supervised_config(given, name, None, schema)
        resolve_supervised(config, gpus=0)
        return config

    return make


def rows_of(config: Any, objective: Objective) -> DataProto:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.chat_template = TEMPLATE
    items = objective.dataset(config.data.train_files, config.data, tokenizer)
    return DataProto.from_single_dict(objective.collate([items[i] for i in range(len(items))], 0))


def worker_of(config: Any, objective: Objective) -> tuple[WorkerGroup, SupervisedWorker]:
    made = SupervisedWorker(config, objective, 10, "cpu")
    group = LocalWorkerGroup(ResourcePool((1,)), lambda: made)
    group.init_model()
    return group, made


def trained(group: WorkerGroup, batch: DataProto) -> dict[str, float]:
    return {k: v[0] for k, v in group.train_batch(batch).meta_info["metrics"].items()}


def told(rows: DataProto) -> list[tuple[Tensor, Tensor]]:
    """Each row's tokens, and which of them are trained, the first one aside."""
    tensors = tensors_of(rows)
    found = []
    for ids, attention, mask in zip(
        tensors["input_ids"], tensors["attention_mask"], tensors["response_mask"], strict=True
    ):
        found.append((ids[attention == 1], mask[attention[1:] == 1].bool()))
    return found


def log_prob(model: nn.Module, ids: Tensor, of_answer: Tensor) -> Tensor:
    log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)  # (T - 1, V)
    return log_p[torch.arange(len(ids) - 1), ids[1:]][of_answer].sum()


def assert_stepped(engine_module: nn.Module, model: nn.Module) -> None:
    """The engine's weights are the model's less its gradient."""
    expected = dict(model.named_parameters())
    for name, parameter in engine_module.named_parameters():
        before = expected[name]
        assert before.grad is not None, name
        after = before - RATE * before.grad
        error = (parameter - after).abs().max() / (RATE * before.grad.abs().max())
        assert error < 1e-3, name


def test_two_rows_a_pair(load: Load) -> None:
    rows = rows_of(load("rm_trainer", "data.margin_key=margin"), REWARD_MODEL)
    tensors = tensors_of(rows)
    assert len(rows) == 8
    assert tensors["margin"].tolist() == [0.5, 0.5, 0, 0, 1, 1, 0.25, 0.25]
    letters = {chr(ord("A") + i): 3 + i for i in range(26)}
    for row, (ids, of_answer) in enumerate(told(rows)):
        pair = PAIRS[row // 2]
        answer = str(pair["chosen"] if row % 2 == 0 else pair["rejected"])
        assert ids.tolist() == [*(letters[c] for c in f"{pair['prompt']}Z{answer}"), 2]
        assert of_answer.sum() == len(answer) + 1
        assert of_answer[-len(answer) - 1 :].all()
    assert tensors_of(rows_of(load("dpo_trainer"), DIRECT)).get("margin", None) is None


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize(
    "cut", [(), ("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=18", "data.max_length=9")]
)
def test_a_reward_models_step(load: Load, cut: tuple[str, ...], margin: bool) -> None:
    config = load("rm_trainer", *cut, f"data.margin_key={'margin' if margin else 'null'}")
    group, worker = worker_of(config, REWARD_MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(config.model.path, num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(worker.engine.module.get_submodule("score").weight)
    rows = rows_of(config, REWARD_MODEL)
    scores = torch.cat([model(ids[None]).logits[0] for ids, _ in told(rows)])  # (8,)
    apart = scores[::2] - scores[1::2]
    wanted = torch.tensor([float(p["margin"]) for p in PAIRS]) if margin else torch.zeros(4)
    loss = -logsigmoid(apart - wanted).mean()
    loss.backward()
    metrics = trained(group, rows)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/margin"] == pytest.approx(apart.mean().item(), rel=1e-4)
    assert metrics["train/accuracy"] == (apart > 0).float().mean().item()
    assert metrics["train/chosen_score"] == pytest.approx(scores[::2].mean().item(), rel=1e-4)
    assert_stepped(worker.engine.module, model)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_steps_of_dpo(load: Load, kind: str) -> None:
    config = load("dpo_trainer", f"dpo.beta={BETA}", f"dpo.loss_type={kind}")
    group, worker = worker_of(config, DIRECT)
    rows = rows_of(config, DIRECT)
    reference = AutoModelForCausalLM.from_pretrained(config.model.path)
    with torch.no_grad():
        held = torch.stack([log_prob(reference, *row) for row in told(rows)])
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    for step in range(2):  # in the first one the two models are the same
        model.zero_grad()
        ratio = torch.stack([log_prob(model, *row) for row in told(rows)]) - held
        x = ratio[::2] - ratio[1::2]
        loss = {
            "sigmoid": torch.log1p(torch.exp(-BETA * x)),
            "ipo": (x - 1 / (2 * BETA)) ** 2,
            "hinge": (1 - BETA * x).clamp(min=0),
        }[kind].mean()
        loss.backward()
        metrics = trained(group, rows)
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["train/margin"] == pytest.approx(BETA * x.mean().item(), rel=1e-3, abs=1e-5)
        if step:
            assert metrics["train/accuracy"] == pytest.approx((x > 0).float().mean().item())
        assert_stepped(worker.engine.module, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(RATE * parameter.grad)
        # Else the two drift apart by more than rounding.
        model.load_state_dict(worker.engine.module.state_dict())
    assert metrics["train/margin"] > 0.01


def test_the_reference_of_an_adapter_is_the_model_without_it(load: Load) -> None:
    config = load("dpo_trainer", "model.lora_rank=2", "optim.lr=2")
    group, worker = worker_of(config, DIRECT)
    assert worker.reference is worker.engine
    rows = rows_of(config, DIRECT)
    before = tensors_of(group.evaluate(rows))
    torch.testing.assert_close(before["log_probs"], before["ref_log_prob"])
    assert trained(group, rows)["train/loss"] == pytest.approx(math.log(2), rel=1e-5)
    trained(group, rows)
    after = tensors_of(group.evaluate(rows))
    torch.testing.assert_close(after["ref_log_prob"], before["ref_log_prob"])
    assert not torch.allclose(after["log_probs"], before["log_probs"], atol=1e-3)
    mask = tensors_of(rows)["response_mask"] == 0
    assert (after["ref_log_prob"][mask] == 0).all()


def test_without_a_reference_there_is_none(load: Load) -> None:
    config = load("dpo_trainer", "dpo.reference_free=True", f"dpo.beta={BETA}")
    group, worker = worker_of(config, DIRECT)
    assert worker.reference is None
    rows = rows_of(config, DIRECT)
    outputs: Any = tensors_of(group.evaluate(rows))
    assert list(outputs.keys()) == ["log_probs"]
    sums = outputs["log_probs"].sum(1)
    expected = -logsigmoid(BETA * (sums[::2] - sums[1::2])).mean()
    scale = LossScale(100, 8)
    loss, metrics = DIRECT.loss(config)(outputs, rows, scale)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert trained(group, rows)["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["chosen_log_prob"].item() == pytest.approx(sums[::2].mean().item(), rel=1e-5)


def test_objectives_travel() -> None:
    import pickle

    for objective in (REWARD_MODEL, DIRECT):
        assert pickle.loads(pickle.dumps(objective)) == objective
    assert pair_batch is REWARD_MODEL.collate


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"chosen": ([1, 2], [1, 0])}, r"has no 'rejected' with .*custom_cls\); it has chosen$"),
        ({"chosen": [1, 2], "rejected": [3, 4]}, "has no 'chosen' with a list of tokens"),
        ({"chosen": ([1, 2], [1]), "rejected": ([3], [0])}, "has no 'chosen' .* the same length"),
    ],
)
def test_items_that_are_no_pairs(item: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pair_batch([item], 0)


def test_margins_are_in_all_items_or_in_none() -> None:
    pair: dict[str, Any] = {"chosen": ([1, 2], [1, 0]), "rejected": ([3, 4], [1, 0])}
    for items in ([pair, {**pair, "margin": 1.0}], [{**pair, "margin": 1.0}, pair]):
        with pytest.raises(DataError, match="some rows of the data set have a margin"):
            pair_batch(items, 0)
