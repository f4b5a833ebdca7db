"""Text that appears token by token is the text of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldera.rollout import SamplingParams
from caldera.serving import ChatModel
from caldera.serving.answering import StreamingText
from caldera.serving.metrics import Histogram, Metric


@pytest.fixture(scope="module")
def model(served: Any) -> ChatModel:
    found: ChatModel = served.server._model
    return found


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), odd=st.lists(st.integers(3, 383), max_size=12))
def test_pieces_make_the_whole(model: ChatModel, text: str, odd: list[int]) -> None:
    tokens = [*model.tokenizer.encode(text), *odd]
    streaming = StreamingText(model, SamplingParams(99))
    told = "".join(streaming.add([token]) for token in tokens)
    whole = model.text(tokens)
    assert told + streaming.rest(whole) == whole
    assert whole.startswith(told)


def test_what_may_begin_a_stop_string_waits(model: ChatModel) -> None:
    streaming = StreamingText(model, SamplingParams(99, stop=("END", "--")))
    told = [
        streaming.add(model.tokenizer.encode(text)) for text in ("a E", "N", "x", "-", "EN", "D")
    ]
    assert told == ["a ", "", "ENx", "", "-", ""]
    assert streaming.rest("a ENx-") == ""


def test_an_end_token_has_no_text(model: ChatModel) -> None:
    ids = model.tokenizer.encode("a")
    streaming = StreamingText(model, SamplingParams(99, stop_token_ids=frozenset(ids)))
    assert streaming.add(ids) == ""
    going_on = SamplingParams(99, stop_token_ids=frozenset(ids), ignore_eos=True)
    assert StreamingText(model, going_on).add(ids) == "a"


def test_the_text_format_of_prometheus() -> None:
    counter = Metric("x_total", "counter", "Some.")
    counter.add(2, path='a"b')
    assert counter.lines() == [
        "# HELP caldera_x_total Some.", "# TYPE caldera_x_total counter",
        'caldera_x_total{path="a\\"b"} 2',
    ]  # fmt: skip
    times = Histogram("t_seconds", "Time.")
    for seconds in (0.01, 0.02, 1000):
        times.observe(seconds)
    lines = times.lines()
    assert 'caldera_t_seconds_bucket{le="0.01"} 1' in lines
    assert 'caldera_t_seconds_bucket{le="300.0"} 2' in lines
    assert lines[-3:] == [
        'caldera_t_seconds_bucket{le="+Inf"} 3', "caldera_t_seconds_sum 1000.03",
        "caldera_t_seconds_count 3",
    ]  # fmt: skip
