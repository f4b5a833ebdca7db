"""What an answer says, written in one way: for votes among several answers to a prompt, and to see
whether scorers find an answer at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from caldera.reward_score import geo3k, gsm8k, hendrycks_math, math_dapo, prime_math, qa_em
from caldera.reward_score.hendrycks_math import BOX, last_boxed
from caldera.reward_score.routing import Scorer, find_scorer

Extractor = Callable[[str], str | None]


def find_extractor(data_source: str) -> Extractor | None:
    """The function that reads what a response answers; None for scorers that say it themselves, as
    `pred`, and for those whose answers are no short texts.

    Two responses that answer the same give the same text; one without an answer gives None.
    """
    reader = _READERS.get(find_scorer(data_source))
    return None if reader is None else reader.extract


@dataclass(frozen=True)
class AnswerFormat:
    """A way in which models write their final answer."""

    example: str
    pattern: re.Pattern[str]
    read_by: str | None
    """A data source whose scorer reads it."""


FORMATS = {
    "boxed": AnswerFormat(r"\boxed{42}", BOX, "lighteval/MATH"),
    "hashes": AnswerFormat("#### 42", re.compile(r"####\s*\S"), "openai/gsm8k"),
    "answer_line": AnswerFormat("Answer: 42", re.compile(r"(?i)answer\s*:\s*\S"), "math_dapo"),
    "answer_is": AnswerFormat("The answer is 42", re.compile(r"(?i)answer\s+is\b"), None),
    "answer_tags": AnswerFormat(
        "<answer>42</answer>", re.compile(r"<answer>.*?</answer>", re.DOTALL), "searchR1_nq"
    ),
}
"""By the name that they have in metrics."""


@dataclass(frozen=True)
class Reader:
    """How a scorer finds the answer in a response."""

    format: str
    """Of `FORMATS`: the one that it asks for."""
    extract: Extractor
    """None for a response in which it finds none."""


def find_reader(data_source: str, options: Mapping[str, Any]) -> Reader | None:
    """How the scorer of a data source, with these options, finds an answer; None for scorers that
    take the whole response, or none of `FORMATS`."""
    scorer = find_scorer(data_source)
    if scorer is math_dapo.compute_score:
        if options.get("strict_box_verify"):
            return Reader("boxed", last_boxed)
        return Reader("answer_line", partial(math_dapo.answer_on_line, is_equation=False))
    if scorer is gsm8k.compute_score and "method" in options:
        return Reader("hashes", partial(gsm8k.extract_answer, method=options["method"]))
    return _READERS.get(scorer)


def _boxed(response: str) -> str | None:
    answer = last_boxed(response)
    return None if answer is None else hendrycks_math.normalise(answer)


def _in_answer_tags(response: str) -> str | None:
    answer = qa_em.last_answer(response)
    return None if answer is None else qa_em.normalise(answer)


_READERS: dict[Scorer, Reader] = {
    gsm8k.compute_score: Reader("hashes", gsm8k.extract_answer),
    hendrycks_math.compute_score: Reader("boxed", _boxed),
    prime_math.compute_score: Reader("boxed", _boxed),
    geo3k.compute_score: Reader("boxed", _boxed),
    qa_em.compute_score: Reader("answer_tags", _in_answer_tags),
}
