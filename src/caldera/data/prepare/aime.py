"""AIME: thirty problems a year, whose answers are integers from 0 to 999."""

from __future__ import annotations

import re

from caldera.data.files import Row
from caldera.data.prepare.answer_line import answer_line_prompt
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

YEAR_IN_ADDRESS = re.compile(r"(20\d\d)_AIME")


@register_preparer(
    "aime", Source("test", "test", HubTable("HuggingFaceH4/aime_2024", None, "train"), "aime")
)
def aime_row(raw: Row, source: Source) -> Row:
    problem = text_of(raw, "problem", "question")
    answer = str(raw.get("answer", "")).strip()
    if not answer.isdecimal():
        raise DataError(f"the answer {answer!r} is not a whole number")
    return rl_row(
        f"{source.data_source}{_year(raw)}",
        answer_line_prompt(problem),
        ability="math",
        # 033 in the answer key is 33 in a response.
        ground_truth=str(int(answer)),
        question=problem,
        answer=raw.get("solution"),
        url=raw.get("url"),
    )


def _year(raw: Row) -> str:
    address = YEAR_IN_ADDRESS.search(str(raw.get("url", "")))
    return str(raw.get("year") or (address[1] if address else ""))
