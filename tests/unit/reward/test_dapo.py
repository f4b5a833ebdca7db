"""The penalty for long responses, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from caldera.errors import ConfigError, UnknownKeyError
from caldera.protocol import DataProto
from caldera.reward import DAPORewardManager, NaiveRewardManager, compute_reward
from caldera.reward.managers import OverlongPenalty

MakeData = Callable[..., DataProto]

KEY = "reward_model.reward_kwargs.overlong_buffer_cfg"


def settings(**changes: Any) -> dict[str, Any]:
    return {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True} | changes


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (15, 0.0),
        (16, 0.0),  # = max - buffer: the last length that is free
        (17, -0.5),  # 1 of the 4 tokens of the buffer, times 2
        (18, -1.0),
        (19, -1.5),
        (20, -2.0),  # = max: the whole factor
        (22, -3.0),  # the line goes on
    ],
)
def test_the_penalty_grows_over_the_buffer(length: int, expected: float) -> None:
    penalty = OverlongPenalty(max_length=20, buffer=4, factor=2.0, log=False)
    assert penalty.reward(length) == expected


def test_the_penalty_is_added_to_the_score(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    # Responses of 1, 2 and 3 tokens of at most 3, with a buffer of 2; `$` ends a response.
    data = make_data([("1+2=", "3", "3"), ("1+2=", "3$", "3"), ("9+4=", "13$", "13")])
    manager = DAPORewardManager(
        tokenizer, 0, max_resp_len=3, overlong_buffer_cfg=settings(penalty_factor=0.5)
    )
    rewards, extra = compute_reward(data, manager)
    assert rewards.tolist() == [[1, 0, 0], [0, 0.75, 0], [0, 0, 0.5]]
    assert rewards.dtype == torch.float32
    assert extra == {
        "score": [1, 1, 1],  # what the score function said
        "acc": [1, 1, 1],
        "pred": ["3", "3", "13"],
        "overlong_reward": [0.0, -0.25, -0.5],
        "overlong": [False, True, True],
    }


def test_a_wrong_long_response_loses_too(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    manager = DAPORewardManager(tokenizer, 0, max_resp_len=3, overlong_buffer_cfg=settings())
    rewards, _ = compute_reward(make_data([("9+4=", "12$", "13")]), manager)
    assert rewards.tolist() == [[0, 0, -0.5]]


def test_a_plain_score_is_recorded_without_the_penalty(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    def always_one(**call: Any) -> float:
        assert set(call) == {
            "data_source", "solution_str", "ground_truth", "extra_info", "weight"
        }  # fmt: skip
        return 1.0

    quiet = {"enable": True, "len": 3, "penalty_factor": 3}  # no log: not recorded
    manager = DAPORewardManager(
        tokenizer, 0, always_one, max_resp_len=3, overlong_buffer_cfg=quiet, weight=2
    )
    rewards, extra = compute_reward(make_data([("1=", "12", "1"), ("1=", "", "1")]), manager)
    assert rewards.tolist() == [[0, -1, 0], [0, 0, 0]]
    assert extra == {"acc": [1.0, 1.0]}


@pytest.mark.parametrize(
    "off", [None, {"enable": False}, {"enable": False, "len": 10**6, "penalty_factor": None}]
)
def test_without_a_buffer_it_is_the_naive_manager(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, off: dict[str, Any] | None
) -> None:
    data = make_data([("1+2=", "3$", "3"), ("9+4=", "13$", "12")])
    dapo = compute_reward(data, DAPORewardManager(tokenizer, 0, overlong_buffer_cfg=off))
    naive = compute_reward(data, NaiveRewardManager(tokenizer, 0))
    assert dapo[0].tolist() == naive[0].tolist()
    assert dapo[1] == naive[1]


def test_given_scores_are_passed_on(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    data = make_data([("1=", "123", "1")])
    assert data.batch is not None
    data.batch["rm_scores"] = torch.tensor([[0.0, 0.25, 0]])
    manager = DAPORewardManager(tokenizer, 0, max_resp_len=3, overlong_buffer_cfg=settings())
    assert compute_reward(data, manager)[0].tolist() == [[0, 0.25, 0]]


def test_an_end_that_is_spelt_out_is_not_scored() -> None:
    """The tokens of the letters of `<eos>` survive decoding, other than the token itself."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i for i, c in enumerate("5<eos>", start=2)}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>"
    )
    spelt = [vocabulary[letter] for letter in "<eos>"]
    responses = torch.tensor([[vocabulary["5"], *spelt, 1], [*spelt, vocabulary["5"], 1]])  # (2, 7)
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[2], [2]]),
            "responses": responses,
            "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        },
        non_tensors={"data_source": ["x", "x"], "reward_model": [{"ground_truth": "5"}] * 2},
    )
    heard: list[str] = []

    def listen(solution_str: str, **call: Any) -> float:
        heard.append(solution_str)
        return 0.0

    DAPORewardManager(tokenizer, 0, listen)(data)
    NaiveRewardManager(tokenizer, 0, listen)(data)
    assert heard == ["5", "<eos>5", "5<eos>", "<eos>5"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"len": None}, r"\.len=null: takes a number of tokens from 1 to max_resp_len=3"),
        ({"len": 0}, r"\.len=0: takes"),
        ({"len": -1}, r"\.len=-1: takes"),
        ({"len": 4}, r"\.len=4: takes .* max_resp_len=3"),
        ({"len": 1.5}, r"\.len=1.5: takes"),
        ({"len": True}, r"\.len=True: takes"),
        ({"len": "2"}, r"\.len='2': takes"),
        ({"penalty_factor": None}, r"\.penalty_factor=null: takes a number"),
        ({"penalty_factor": -1.0}, r"\.penalty_factor=-1.0: takes a number, 0 or larger"),
        ({"penalty_factor": float("nan")}, r"\.penalty_factor=nan: takes"),
        ({"penalty_factor": float("inf")}, r"\.penalty_factor=inf: takes"),
        ({"penalty_factor": "big"}, r"\.penalty_factor='big': takes"),
        ({"log": "yes"}, r"\.log='yes': takes true or false"),
        ({"enable": 1}, r"\.enable=1: takes true or false"),
    ],
)
def test_settings_that_make_no_sense(
    tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=KEY + said):
        DAPORewardManager(tokenizer, 0, max_resp_len=3, overlong_buffer_cfg=settings(**changes))


def test_the_whole_response_may_be_buffer(tokenizer: PreTrainedTokenizerFast) -> None:
    manager = DAPORewardManager(tokenizer, 0, max_resp_len=3, overlong_buffer_cfg=settings(len=3))
    assert manager.overlong is not None
    assert manager.overlong.reward(3) == -0.5


def test_settings_that_do_not_exist(tokenizer: PreTrainedTokenizerFast) -> None:
    for name, hint in [("length", "; did you mean 'len'"), ("x", r" \(known: enable, len")]:
        with pytest.raises(UnknownKeyError, match=rf"{KEY}\.{name} does not exist{hint}"):
            DAPORewardManager(tokenizer, 0, overlong_buffer_cfg={"enable": False, name: 1})
    with pytest.raises(ConfigError, match=rf"{KEY}\.enable is missing"):
        DAPORewardManager(tokenizer, 0, max_resp_len=3, overlong_buffer_cfg={"len": 2})
    with pytest.raises(ConfigError, match=rf"{KEY}=True: takes enable, len, penalty_factor, log"):
        DAPORewardManager(tokenizer, 0, overlong_buffer_cfg=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [None, 0, 2.5])
def test_a_penalty_needs_the_longest_response(
    tokenizer: PreTrainedTokenizerFast, length: Any
) -> None:
    shown = "null" if length is None else length
    with pytest.raises(ConfigError, match=rf"reward_kwargs\.max_resp_len={shown}: takes"):
        DAPORewardManager(tokenizer, 0, max_resp_len=length, overlong_buffer_cfg=settings())
