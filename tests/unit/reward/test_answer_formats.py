"""Responses in a format that their scorer does not read are counted, and warned of once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from caldera.demo.arithmetic import build_tokenizer
from caldera.protocol import DataProto
from caldera.reward import AnswerFormats, NaiveRewardManager
from caldera.reward_score import default_compute_score
from caldera.reward_score.predictions import FORMATS
from caldera.trainer.ppo.validation import Responses

WRITTEN = {
    "boxed": r"so it is $\boxed{42}$.",
    "hashes": "so it is\n#### 42",
    "answer_line": "so it is\nAnswer: 42",
    "answer_is": "so The answer is 42",
    "answer_tags": "<think>.</think><answer>42</answer>",
}
READ_AS = {
    "openai/gsm8k": "hashes",
    "lighteval/MATH": "boxed",
    "numina_cn_k12": "boxed",
    "math_dapo": "answer_line",
    "searchR1_nq": "answer_tags",
}


def test_every_format_has_an_example_that_it_finds() -> None:
    assert WRITTEN.keys() == FORMATS.keys()
    for name, each in FORMATS.items():
        assert each.pattern.search(each.example)
        assert [n for n, text in WRITTEN.items() if each.pattern.search(text)] == [name]


@pytest.mark.parametrize("source", READ_AS)
def test_a_scorer_finds_an_answer_where_it_scores_one(source: str) -> None:
    truth: Any = {"target": "42"} if source.startswith("searchR1") else "42"
    for name, text in WRITTEN.items():
        counted = AnswerFormats({}).counts([source], [text])[source]
        scored = default_compute_score(source, text, truth)
        score = scored["score"] if isinstance(scored, dict) else scored
        assert counted.parsed == (score == 1.0) == (name == READ_AS[source])


def test_the_data_source_that_a_warning_names_reads_the_format() -> None:
    for name, each in FORMATS.items():
        assert each.read_by is None or READ_AS[each.read_by] == name


def test_shares() -> None:
    texts = [WRITTEN["hashes"], WRITTEN["boxed"], WRITTEN["boxed"], "no idea"]
    shares = AnswerFormats({}).counts(["openai/gsm8k"] * 4, texts)["openai/gsm8k"].shares()
    assert shares == {
        "parsed": 0.25, "format_boxed": 0.5, "format_hashes": 0.25, "format_answer_line": 0.0,
        "format_answer_is": 0.0, "format_answer_tags": 0.0,
    }  # fmt: skip


def test_one_warning_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    formats = AnswerFormats({})
    texts = [WRITTEN["boxed"]] * 61 + ["no idea"] * 3
    with caplog.at_level(logging.WARNING, logger="caldera"):
        for _ in range(2):
            formats.warn(formats.counts(["openai/gsm8k"] * 64, texts))
    assert caplog.messages == [
        "openai/gsm8k: its scorer finds an answer in 0 of 64 responses; 61 have `\\boxed{42}`, "
        "which it does not read. Ask for `#### 42` in the prompts, set "
        "data_source='lighteval/MATH' in the data, or give a custom function "
        "(custom_reward_function.path)"
    ]


@pytest.mark.parametrize(
    ("source", "texts", "options"),
    [
        ("openai/gsm8k", [WRITTEN["hashes"]] * 4, {}),
        ("openai/gsm8k", [WRITTEN["hashes"] + WRITTEN["boxed"]] * 4, {}),
        ("openai/gsm8k", ["no idea"] * 7 + [WRITTEN["boxed"]], {}),
        ("openai/gsm8k", [WRITTEN["hashes"]] * 2 + [WRITTEN["boxed"]] * 2, {}),
        ("openai/gsm8k", [WRITTEN["boxed"]] * 4, {"method": "flexible"}),
        ("math_dapo", [WRITTEN["boxed"]] * 4, {"strict_box_verify": True}),
        ("caldera/arithmetic", [WRITTEN["boxed"]] * 4, {}),
    ],
)
def test_no_warning(
    caplog: pytest.LogCaptureFixture, source: str, texts: list[str], options: dict[str, Any]
) -> None:
    formats = AnswerFormats(options)
    formats.warn(formats.counts([source] * len(texts), texts))
    assert caplog.messages == []


def test_a_custom_function_may_read_anything() -> None:
    tokenizer = build_tokenizer()
    own = NaiveRewardManager(tokenizer, 0, lambda **given: 1.0)
    by_source = NaiveRewardManager(tokenizer, 0, method="flexible")
    source, text = ["openai/gsm8k"], [WRITTEN["boxed"]]
    assert AnswerFormats.of(own).counts(source, text) == {}
    assert AnswerFormats.of(by_source).counts(source, text)["openai/gsm8k"].parsed == 1


def test_answers_that_agents_scored_are_not_looked_at() -> None:
    answers = Responses()
    tokenizer = build_tokenizer()
    tensors = {
        "prompts": torch.ones(2, 1, dtype=torch.long),
        "responses": torch.ones(2, 1, dtype=torch.long),
    }
    columns = {"data_source": ["a", "b"], "uid": ["1", "2"]}
    batch = DataProto.from_dict(tensors, columns)
    answers.add(batch, [0.0, 0.0], {}, [True, True], tokenizer, "data_source")
    assert answers.read_by_scorers()[0] == ["a", "b"]
    answers.is_of_agent[0] = True
    assert answers.read_by_scorers()[0] == ["b"]
