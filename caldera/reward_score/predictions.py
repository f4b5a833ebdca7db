"""What an answer says, written in one way: for votes among several answers to a prompt."""

from __future__ import annotations

from collections.abc import Callable

from caldera.reward_score import geo3k, gsm8k, hendrycks_math, prime_math, qa_em
from caldera.reward_score.boxed import last_boxed
from caldera.reward_score.routing import Scorer, find_scorer

__all__ = ["find_extractor"]

Extractor = Callable[[str], str | None]


def find_extractor(data_source: str) -> Extractor | None:
    """The function that reads what a response answers; None for scorers that say it themselves, as
    `pred`, and for those whose answers are no short texts.

    Two responses that answer the same give the same text; one without an answer gives None.
    """
    return _EXTRACTORS.get(find_scorer(data_source))


def _boxed(response: str) -> str | None:
    answer = last_boxed(response)
    return None if answer is None else hendrycks_math.normalise(answer)


def _in_answer_tags(response: str) -> str | None:
    answer = qa_em.last_answer(response)
    return None if answer is None else qa_em.normalise(answer)


_EXTRACTORS: dict[Scorer, Extractor] = {
    gsm8k.compute_score: gsm8k.extract_answer,
    hendrycks_math.compute_score: _boxed,
    prime_math.compute_score: _boxed,
    geo3k.compute_score: _boxed,
    qa_em.compute_score: _in_answer_tags,
}
