"""The naive reward manager, with a real tokenizer and real score functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from caldera.config import PPOTrainerConfig
from caldera.errors import DataError, RegistryError, RewardError
from caldera.protocol import DataProto
from caldera.reward import NaiveRewardManager, compute_reward, load_reward_manager

PROMPT_LENGTH, RESPONSE_LENGTH = 4, 3
ALPHABET = "0123456789+=-"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; 0 pads and 1 ends."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i for i, c in enumerate(ALPHABET, start=2)}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.decoder = decoders.Fuse()  # no spaces between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>"
    )


def make_data(
    rows: list[tuple[str, str, Any]],
    data_source: str | list[str] = "caldera/arithmetic",
    **columns: list[Any],
) -> DataProto:
    """Rows of (prompt, response, ground truth)."""
    ids = {character: i for i, character in enumerate(ALPHABET, start=2)} | {"$": 1}
    # Padding that would be read as a digit, if the attention mask were not heeded.
    prompts = torch.full((len(rows), PROMPT_LENGTH), ids["9"])
    responses = torch.full((len(rows), RESPONSE_LENGTH), ids["9"])
    attention_mask = torch.zeros(len(rows), PROMPT_LENGTH + RESPONSE_LENGTH, dtype=torch.int64)
    for row, (prompt, response, _) in enumerate(rows):
        start, length = PROMPT_LENGTH - len(prompt), len(response)
        prompts[row, start:] = torch.tensor([ids[c] for c in prompt])
        responses[row, :length] = torch.tensor([ids[c] for c in response], dtype=torch.int64)
        attention_mask[row, start : PROMPT_LENGTH + length] = 1
    sources = [data_source] * len(rows) if isinstance(data_source, str) else data_source
    non_tensors: dict[str, list[Any]] = {
        "data_source": sources,
        "reward_model": [{"style": "rule", "ground_truth": truth} for *_, truth in rows],
        **columns,
    }
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "attention_mask": attention_mask},
        non_tensors=non_tensors,
    )


def test_the_score_stands_on_the_last_token(tokenizer: PreTrainedTokenizerFast) -> None:
    # `$` ends a response: a token like any other, but none of the text that is scored.
    data = make_data([("1+2=", "3", "3"), ("9+4=", "13$", "13"), ("2+2=", "5$", "4")])
    rewards, extra = compute_reward(data, NaiveRewardManager(tokenizer, num_examine=0))
    assert rewards.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert rewards.dtype == torch.float32
    assert extra == {"score": [1, 1, 0], "acc": [1, 1, 0], "pred": ["3", "13", "5"]}


def test_without_return_dict_it_is_the_tensor_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    result = NaiveRewardManager(tokenizer, 0)(make_data([("1+2=", "3", "3")]))
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [[1, 0, 0]]


def test_an_empty_response_is_scored_and_writes_nothing(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, compute_score=lambda **call: len(call) + 0.5)
    rewards, extra = compute_reward(make_data([("1=", "", "1"), ("1=", "1", "1")]), manager)
    assert rewards.tolist() == [[0, 0, 0], [4.5, 0, 0]]
    assert extra == {"acc": [4.5, 4.5]}


def test_given_scores_are_passed_on(tokenizer: PreTrainedTokenizerFast) -> None:
    def never(**call: Any) -> float:
        raise AssertionError("scored although there are scores")

    data = make_data([("1=", "1", "1"), ("1=", "2", "1")], acc=[1.0, 0.0], other=["x", "y"])
    assert data.batch is not None
    data.batch["rm_scores"] = torch.tensor([[0.0, 0.25, 0], [0.5, 0, 0]])
    data.meta_info["reward_extra_keys"] = ["acc"]
    rewards, extra = compute_reward(data, NaiveRewardManager(tokenizer, 0, never))
    assert rewards.tolist() == [[0, 0.25, 0], [0.5, 0, 0]]
    assert extra == {"acc": [1.0, 0.0]}


def test_what_a_score_function_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    calls: list[dict[str, Any]] = []

    def record(**call: Any) -> float:
        calls.append(call)
        return 0.0

    own = {"index": 7}
    data = make_data(
        [("1+1=", "2", ["2", "two"])],
        kind=["sums"],
        extra_info=[own],
        __num_turns__=[np.int32(2)],
        turn_scores=[[0.5]],
        tool_rewards=[[1.0]],
        reward_scores=[{"tool": 1.0}],
    )
    NaiveRewardManager(tokenizer, 0, record, reward_fn_key="kind", weight=3)(data)
    assert calls == [
        {
            "data_source": "sums",
            "solution_str": "2",
            "ground_truth": ["2", "two"],
            "extra_info": {
                "index": 7,
                "num_turns": 2,
                "turn_scores": [0.5],
                "tool_rewards": [1.0],
                "rollout_reward_scores": {"tool": 1.0},
            },
            "weight": 3,
        }
    ]
    assert own == {"index": 7}, "the row's own extra_info was changed"


def test_extra_info_may_be_absent_or_none(tokenizer: PreTrainedTokenizerFast) -> None:
    def told(extra_info: Any, **call: Any) -> dict[str, Any]:
        return {"score": 0.0, "told": extra_info}

    rows = [("1=", "1", "1")]
    for data in [make_data(rows), make_data(rows, extra_info=[None])]:
        _, extra = compute_reward(data, NaiveRewardManager(tokenizer, 0, told))
        assert extra["told"] == [{}]


def test_mixed_results_make_lists_of_equal_length(tokenizer: PreTrainedTokenizerFast) -> None:
    results = iter(
        [True, np.float32(0.5), torch.tensor(2.0), {"score": 1, "acc": np.True_, "pred": "x"}]
    )
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: next(results))
    rewards, extra = compute_reward(make_data([("1=", "1", "1")] * 4), manager)
    assert rewards[:, 0].tolist() == [1.0, 0.5, 2.0, 1.0]
    assert extra == {
        "acc": [True, 0.5, 2.0, True],
        "score": [None, None, None, 1],
        "pred": [None, None, None, "x"],
    }


def test_an_async_score_function(tokenizer: PreTrainedTokenizerFast) -> None:
    async def compute_score(solution_str: str, ground_truth: str, **call: Any) -> float:
        return float(solution_str == ground_truth)

    manager = NaiveRewardManager(tokenizer, 0, compute_score)
    data = make_data([("1=", "1", "1"), ("2=", "2", "3")])
    for _ in range(2):
        rewards, extra = compute_reward(data, manager)
        assert rewards[:, 0].tolist() == [1.0, 0.0]
        assert extra == {"acc": [1.0, 0.0]}


def crash(**call: Any) -> float:
    raise ZeroDivisionError("by zero")


async def crash_later(**call: Any) -> float:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("compute_score", [crash, crash_later])
def test_a_score_function_that_raises(
    tokenizer: PreTrainedTokenizerFast, compute_score: Callable[..., Any]
) -> None:
    data = make_data([("1=", "12", "truth")], uid=["u-5"])
    with pytest.raises(RewardError) as raised:
        NaiveRewardManager(tokenizer, 0, compute_score)(data)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    message = str(raised.value)
    for part in ["row 0", "u-5", "ZeroDivisionError: by zero", "arithmetic", "'truth'", "'12'"]:
        assert part in message


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1.0", "'1.0'"),
        (None, "None"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (torch.tensor([1.0, 2.0]), "tensor"),
        ({"acc": 1.0}, "without 'score', with acc"),
        ({}, "without 'score', with nothing"),
        ({"score": None}, "None"),
        ({"score": np.float64("nan")}, "nan"),
    ],
)
def test_a_score_function_that_returns_nonsense(
    tokenizer: PreTrainedTokenizerFast, returned: Any, problem: str
) -> None:
    results = iter([1.0, returned])
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: next(results))
    with pytest.raises(RewardError, match=r"row 1: ") as raised:
        manager(make_data([("1=", "1", "1")] * 2))
    assert problem in str(raised.value)


def test_an_unknown_data_source(tokenizer: PreTrainedTokenizerFast) -> None:
    data = make_data([("1=", "1", "1")], data_source="nowhere")
    with pytest.raises(RewardError, match=r"^no scorer serves the data source 'nowhere'"):
        NaiveRewardManager(tokenizer, 0)(data)


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_a_missing_column(tokenizer: PreTrainedTokenizerFast, column: str) -> None:
    data = make_data([("1=", "1", "1")], extra_info=[{}])
    del data.non_tensor_batch[column]
    with pytest.raises(DataError) as raised:
        NaiveRewardManager(tokenizer, 0)(data)
    message = str(raised.value)
    assert f"needs the column {column!r}" in message
    there = ", ".join(sorted(data.non_tensor_batch))
    assert message.endswith(f"the data has {there}")


def test_a_missing_ground_truth(tokenizer: PreTrainedTokenizerFast) -> None:
    data = make_data([("1=", "1", "1")] * 2)
    data.non_tensor_batch["reward_model"][1] = {"style": "rule"}
    with pytest.raises(DataError, match=r"row 1: .*'reward_model'.*'ground_truth'.*'style'"):
        NaiveRewardManager(tokenizer, 0)(data)


def test_extra_info_that_is_no_dict(tokenizer: PreTrainedTokenizerFast) -> None:
    data = make_data([("1=", "1", "1")], extra_info=["text"])
    with pytest.raises(DataError, match=r"row 0: .*'extra_info'.*'text'"):
        NaiveRewardManager(tokenizer, 0)(data)


def test_the_first_samples_of_each_data_source_are_shown(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ["caldera/arithmetic", "caldera/arithmetic", "openai/gsm8k"]
    data = make_data([("1+1", "2$", "2"), ("1+2", "3", "3"), ("1+3=", "4", "4")], sources)
    NaiveRewardManager(tokenizer, num_examine=1)(data)
    shown = capsys.readouterr().out
    assert shown.splitlines()[:4] == [
        "[prompt] 1+1",
        "[response] 2",
        "[ground_truth] 2",
        "[score] 1.0",
    ]
    assert "[prompt] 1+3=" in shown
    assert "1+2" not in shown

    NaiveRewardManager(tokenizer, num_examine=0)(data)
    assert capsys.readouterr().out == ""


def test_load_reward_manager(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = tmp_path / "lengths.py"
    source.write_text(
        "def length(data_source, solution_str, ground_truth, extra_info=None, factor=1, plus=0):\n"
        "    return {'score': len(solution_str) * factor + plus, 'source': data_source}\n"
    )
    config = PPOTrainerConfig()
    config.data.reward_fn_key = "kind"
    config.reward_model.reward_kwargs = {"factor": 2, "plus": 100}
    config.custom_reward_function.path = str(source)
    config.custom_reward_function.name = "length"
    config.custom_reward_function.reward_kwargs = {"plus": 0.5}
    manager = load_reward_manager(config, tokenizer, num_examine=0)
    rewards, extra = compute_reward(make_data([("1=", "123", "1")], kind=["k"]), manager)
    assert rewards.tolist() == [[0, 0, 6.5]]
    assert extra == {"score": [6.5], "source": ["k"]}


def test_by_default_the_data_source_chooses_the_scorer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    manager = load_reward_manager(PPOTrainerConfig(), tokenizer, num_examine=0)
    rewards, _ = compute_reward(make_data([("1+1=", "2", "2")]), manager)
    assert rewards.tolist() == [[1, 0, 0]]


def test_an_unknown_reward_manager(tokenizer: PreTrainedTokenizerFast) -> None:
    config = PPOTrainerConfig()
    config.reward_model.reward_manager = "naiv"
    with pytest.raises(
        RegistryError, match=r"reward_model\.reward_manager 'naiv'; did you mean 'naive'"
    ):
        load_reward_manager(config, tokenizer, num_examine=0)


def test_a_manager_must_return_a_dict_when_asked_for_one() -> None:
    class TensorOnly:
        def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor:
            return torch.zeros(1, 1)

    with pytest.raises(RewardError, match="TensorOnly"):
        compute_reward(make_data([("1=", "1", "1")]), TensorOnly())
