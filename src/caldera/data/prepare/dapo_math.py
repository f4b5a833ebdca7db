"""DAPO-Math-17k: competition problems with integer answers, given after `Answer:`."""

from __future__ import annotations

from caldera.data.chat import Message, chat_messages
from caldera.data.files import Row
from caldera.data.prepare.answer_line import answer_line_prompt
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of


@register_preparer(
    "dapo_math",
    Source(
        "train",
        "dapo-math-17k",
        HubTable("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
        "math_dapo",
    ),
    Source(
        "train",
        "train",
        HubTable("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
        "math_dapo",
    ),
    unique_prompts=True,  # the published file holds each problem about a hundred times
)
def dapo_math_row(raw: Row, source: Source) -> Row:
    """Published rows have their prompt already; others are a problem with its answer."""
    return rl_row(
        source.data_source,
        _prompt(raw),
        ability="math",
        ground_truth=_answer(raw),
        id=(raw.get("extra_info") or {}).get("index"),
    )


def _answer(raw: Row) -> str:
    published = (raw.get("reward_model") or {}).get("ground_truth")
    answers = {"ground_truth": published, "answer": raw.get("answer")}
    given = {name: str(value) for name, value in answers.items() if value is not None}
    return text_of(raw | given, "ground_truth", "answer", "solution")


def _prompt(raw: Row) -> str | list[Message]:
    if isinstance(raw.get("prompt"), list):
        return chat_messages(raw["prompt"], "the prompt")
    return answer_line_prompt(text_of(raw, "problem", "question", "prompt"))
