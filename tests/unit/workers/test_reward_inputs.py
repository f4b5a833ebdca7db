"""A reward model with a tokenizer of its own reads conversations in its own template's words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from caldera.config import PPOTrainerConfig
from caldera.errors import DataError
from caldera.protocol import DataProto
from caldera.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.workers import RewardModelWorker
from caldera.workers.reward_model import RewardInputs
from tests.reward_models import Messages, plain_scores, save_reward_model

Load = Callable[..., PPOTrainerConfig]
BY_ROWS = "reward_model.micro_batch_size_per_gpu=2"
LETTERS = ["FGHI", "A", "", "QRSTUVW"]  # each is one of the actor's tokens
RESPONSES = [" ".join(letters) for letters in LETTERS]  # as the actor's tokenizer decodes them
CHATS: list[Messages] = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}],
    [{"role": "user", "content": "Write a poem."}],
    [{"role": "user", "content": "Écris un poème."}],
    [
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "and five?"},
    ],
]
EOS = 2


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture
def settings(load: Load, folder: Path) -> Callable[..., PPOTrainerConfig]:
    return lambda *more: load(f"reward_model.model.path={folder}", BY_ROWS, *more)


@pytest.fixture
def judge(settings: Load) -> Callable[..., WorkerGroup]:
    def make(*overrides: str) -> WorkerGroup:
        config = settings(*overrides).reward_model
        group = LocalWorkerGroup(ResourcePool((1,)), lambda: RewardModelWorker(config, "cpu"))
        group.init_model()
        return group

    return make


@pytest.fixture
def answers() -> DataProto:
    """Letters and the end token, padded to 9; prompts of two tokens, the first one padded."""
    rows = [[ord(letter) - ord("A") + 3 for letter in text] + [EOS] for text in LETTERS]
    rows[2] = []
    responses = torch.tensor([row + [0] * (9 - len(row)) for row in rows])
    valid = torch.tensor([[1] * len(row) + [0] * (9 - len(row)) for row in rows])
    prompts = torch.tensor([[0, 7], [4, 5], [4, 5], [4, 5]])
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": torch.cat([(prompts > 0).long(), valid], 1),
            "responses": responses,
        },
        {"raw_prompt": CHATS},
    )


def conversations(chats: list[Messages] = CHATS) -> list[Messages]:
    return [
        [*chat, {"role": "assistant", "content": text}]
        for chat, text in zip(chats, RESPONSES, strict=True)
    ]


def test_the_tokens_are_those_of_the_models_own_template(
    settings: Load, folder: Path, answers: DataProto
) -> None:
    own: Any = AutoTokenizer.from_pretrained(folder)
    found = RewardInputs(settings().reward_model).tokens(answers)
    texts = [own.decode(ids) for ids in found]
    assert texts[0] == (
        "<s><|system|>\nBe brief.</s>\n<|user|>\nWhat is it?</s>\n<|assistant|>\nF G H I</s>\n"
    )
    for ids, conversation in zip(found, conversations(), strict=True):
        assert ids == own.apply_chat_template(conversation, return_dict=True)["input_ids"]
        assert ids.count(own.bos_token_id) == 1


def test_scores_are_those_of_transformers(
    judge: Callable[..., WorkerGroup], folder: Path, answers: DataProto
) -> None:
    scores = judge().compute_rm_score(answers).batch["rm_scores"]  # (B, R)
    expected = torch.zeros(4, 9)
    for row, score in enumerate(plain_scores(folder, conversations())):
        if LETTERS[row]:  # an answer without tokens has no place for its score
            expected[row, len(LETTERS[row])] = score
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert len(set(scores.sum(1).tolist())) == 4


def test_a_conversation_is_cut_at_its_end(
    judge: Callable[..., WorkerGroup], folder: Path, answers: DataProto
) -> None:
    group = judge("reward_model.max_length=20")
    scores = group.compute_rm_score(answers).batch["rm_scores"].sum(1)
    expected = torch.tensor(plain_scores(folder, conversations(), max_length=20))
    expected[2] = 0
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_without_messages_the_prompt_is_one_of_the_users(
    settings: Load, folder: Path, answers: DataProto
) -> None:
    answers.non_tensor_batch.clear()
    own = AutoTokenizer.from_pretrained(folder)
    first = own.decode(RewardInputs(settings().reward_model).tokens(answers)[0])
    assert first == "<s><|user|>\nE</s>\n<|assistant|>\nF G H I</s>\n"


def test_null_is_the_actors_own_tokens(settings: Load, answers: DataProto) -> None:
    config = settings("reward_model.model.input_tokenizer=null", "reward_model.max_length=4")
    found = RewardInputs(config.reward_model).tokens(answers)
    assert found == [[7, 8, 9, 10], [4, 5, 3, 2], [4, 5], [4, 5, 19, 20]]


def test_equal_tokenizers_are_no_reason_to_render_anew(
    settings: Load, folder: Path, tmp_path: Path, answers: DataProto
) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    config = settings(f"reward_model.model.input_tokenizer={tmp_path}").reward_model
    assert RewardInputs(config).tokens(answers)[2] == [4, 5]


def test_a_reward_model_without_a_tokenizer(
    settings: Load, tmp_path: Path, model_folder: Callable[..., str]
) -> None:
    hint = "reward_model.model.input_tokenizer=null it reads the actor's tokens"
    for path, problem in ((str(tmp_path), "no tokenizer"), (model_folder("qwen2"), "template")):
        with pytest.raises(DataError, match=r"^reward_model\.model\.path=") as raised:
            RewardInputs(settings(f"reward_model.model.path={path}").reward_model)
        assert problem in str(raised.value)
        assert hint in str(raised.value)
