"""GSM8K: word problems whose answer is the number after `####`."""

from __future__ import annotations

import re

from caldera.data.files import Row
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FINAL_ANSWER = re.compile(r"#### \$?(-?[0-9.,]+)")


@register_preparer(
    "gsm8k",
    Source("train", "train", HubTable(NAME, "main", "train"), NAME),
    Source("test", "test", HubTable(NAME, "main", "test"), NAME),
)
def gsm8k_row(raw: Row, source: Source) -> Row:
    question, answer = text_of(raw, "question"), text_of(raw, "answer")
    final = FINAL_ANSWER.findall(answer)
    if not final:
        raise DataError(f"no number after '#### ' in the answer {answer!r}")
    return rl_row(
        source.data_source,
        f"{question} {INSTRUCTION}",
        ability="math",
        ground_truth=final[-1].replace(",", ""),
        question=question,
        answer=answer,
    )
