"""The reward model's worker, against transformers' own classifier on padded rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from caldera.config import FSDPConfig, PPOTrainerConfig
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine
from caldera.errors import ConfigError
from caldera.models.loading import build_reward_model
from caldera.protocol import DataProto
from caldera.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.workers import RewardModelWorker

Group = Callable[..., WorkerGroup]
Load = Callable[..., PPOTrainerConfig]
BY_ROWS = "reward_model.micro_batch_size_per_gpu=2"
LENGTHS = [8, 3, 1, 0, 5, 8]  # tokens of each answer


@pytest.fixture(scope="session")
def classifier(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[..., PreTrainedModel],
    model_folder: Callable[..., str],
) -> Callable[..., str]:
    """The folder of a sequence classifier with so many labels, and of the actor's tokenizer."""

    def folder(labels: int = 1) -> str:
        path = tmp_path_factory.mktemp("classifier")
        config = copy.deepcopy(tiny_model().config)
        config.num_labels = labels
        with torch.random.fork_rng():
            torch.manual_seed(5)
            AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
        AutoTokenizer.from_pretrained(model_folder()).save_pretrained(path)
        return str(path)

    return folder


@pytest.fixture
def judge(load: Load, classifier: Callable[..., str]) -> Group:
    """A group of one reward-model worker with its model loaded."""

    def make(*overrides: str) -> WorkerGroup:
        config = load(f"reward_model.model.path={classifier()}", *overrides).reward_model
        group = LocalWorkerGroup(ResourcePool((1,)), lambda: RewardModelWorker(config, "cpu"))
        group.init_model()
        return group

    return make


@pytest.fixture
def answers(prompts: DataProto) -> DataProto:
    """Six answers of different lengths, one of them empty; no response mask is needed."""
    assert prompts.batch is not None
    generator = torch.Generator().manual_seed(1)
    valid = (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).long()
    responses = torch.randint(3, 48, (6, 8), generator=generator) * valid
    attention = torch.cat([prompts.batch["attention_mask"], valid], 1)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts.batch["input_ids"], responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "responses": responses,
        }
    )


def scores_of(group: WorkerGroup, batch: DataProto) -> Tensor:
    scores: Tensor = group.compute_rm_score(batch).batch["rm_scores"]
    return scores


def test_scores_are_those_of_transformers(
    judge: Group, answers: DataProto, classifier: Callable[..., str]
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(classifier())
    with torch.no_grad():
        logits = model(
            answers.batch["input_ids"],
            attention_mask=answers.batch["attention_mask"],
            position_ids=answers.batch["position_ids"],
        ).logits  # (B, 1), of the last token that is not padding
    expected = torch.zeros(6, 8)
    for row, length in enumerate(LENGTHS):
        if length > 0:
            expected[row, length - 1] = logits[row, 0]
    scores = scores_of(judge(BY_ROWS), answers)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert ((scores != 0).sum(1) == torch.tensor([1, 1, 1, 0, 1, 1])).all()


def test_scores_do_not_depend_on_the_micro_batches(judge: Group, answers: DataProto) -> None:
    expected = scores_of(judge(BY_ROWS), answers)
    for overrides in (
        ["reward_model.micro_batch_size_per_gpu=5"],
        ["reward_model.use_dynamic_bsz=True", "reward_model.forward_max_token_len_per_gpu=15"],
        [BY_ROWS, "reward_model.model.fsdp_config.param_offload=True"],
    ):
        scores = scores_of(judge(*overrides), answers)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing(judge: Group, answers: DataProto) -> None:
    group = judge(BY_ROWS)
    expected = scores_of(group, answers)
    wider = {name: pad(answers.batch[name], (3, 2)) for name in ("input_ids", "attention_mask")}
    nonsense = torch.where(wider["attention_mask"] == 1, wider["input_ids"], 17)
    scores = scores_of(
        group,
        DataProto.from_dict(
            {
                "input_ids": nonsense,
                "attention_mask": wider["attention_mask"],
                "position_ids": pad(answers.batch["position_ids"], (3, 2)),
                "responses": nonsense[:, -10:],
            }
        ),
    )
    torch.testing.assert_close(scores, pad(expected, (0, 2)), rtol=1e-5, atol=1e-6)


def test_the_head_keeps_its_digits_in_bfloat16(
    load: Load, judge: Group, answers: DataProto, classifier: Callable[..., str]
) -> None:
    source = load(f"reward_model.model.path={classifier()}").reward_model.model
    module = build_reward_model(source, torch.bfloat16, "reward_model.model").module
    memory = FSDPConfig(model_dtype="bf16", dtype="bfloat16")
    engine = LocalEngine(module, torch.device("cpu"), EngineOptions(memory))
    scores = engine.infer(answers, ForwardPlan(("scores",), False, 3, None))["scores"]
    assert (scores != scores.bfloat16()).any()
    torch.testing.assert_close(scores, scores_of(judge(BY_ROWS), answers), rtol=0.1, atol=0.05)


def test_a_language_model_is_no_reward_model(
    judge: Group, model_folder: Callable[..., str]
) -> None:
    path = model_folder()
    expected = f"reward_model.model.path='{path}' is no trained reward model: its files lack score"
    with pytest.raises(ConfigError) as raised:
        judge(BY_ROWS, f"reward_model.model.path={path}")
    assert str(raised.value).startswith(expected)


def test_a_classifier_of_several_labels(judge: Group, classifier: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="has 3 labels: a reward model has one"):
        judge(BY_ROWS, f"reward_model.model.path={classifier(labels=3)}")


def test_a_folder_that_is_not_there(judge: Group, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reward_model\.model\.path=.*no such folder"):
        judge(BY_ROWS, f"reward_model.model.path={tmp_path / 'nowhere'}")
