from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from caldera.data.prepare import FileCheck, check_file
from caldera.data.prepare.check import check_tables, histogram
from caldera.errors import DataError, RewardError

Row = dict[str, Any]
WriteJsonl = Callable[..., str]


def row(text: object, truth: object = "1", source: str = "known") -> Row:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def scorer_of(data_source: str) -> Callable[..., Any]:
    if data_source != "known":
        raise RewardError("no scorer")
    return json.dumps


def check(file: str, **options: Any) -> FileCheck:
    return check_file(file, find_scorer=scorer_of, **options)


def shown(found: FileCheck) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(check_tables(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_file_in_order(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast) -> None:
    found = check(
        write_jsonl([row("abc"), row("a"), row("b [x]", source="new")]), tokenizer=tokenizer
    )
    assert found.problems == []
    assert found.schema["reward_model"] == "struct<style: string, ground_truth: string>"
    assert found.sources == {"known": (2, "json.dumps"), "new": (1, None)}
    assert (found.rows, found.characters, found.tokens) == (3, [3, 1, 5], [5, 3, 7])
    assert (found.duplicates, found.overlap) == (0, None)
    text = shown(found)
    for part in ("3 rows", "json.dumps", "none known", "tokens of a prompt: 3 to 7, median 5"):
        assert part in text
    assert "no problems found" in text


def test_prompts_that_differ_in_space_and_case_are_the_same(write_jsonl: WriteJsonl) -> None:
    file = write_jsonl([row("One  two"), row("one\ntwo "), row("three")])
    other = write_jsonl([row("ONE TWO"), row("four")], "other.jsonl")
    found = check(file, against=other)
    assert (found.duplicates, found.overlap) == (1, 2)
    assert found.problems == [f"2 rows with prompts that are in {other} too"]
    assert "what is wrong" in shown(found)
    assert check(other, against=write_jsonl([row("five")])).problems == []


def test_plain_rows_are_no_problem_but_no_built_in_scorer_reads_them(
    write_jsonl: WriteJsonl,
) -> None:
    found = check(write_jsonl([{"prompt": "a", "answer": 1}]))
    assert (found.problems, found.missing) == ([], ["data_source", "reward_model"])
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(check_tables(found))
    assert "without 'data_source' and 'reward_model', only a custom" in console.export_text()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"data_source": "known", "reward_model": {"ground_truth": 1}}], "no column 'prompt'"),
        ([row("a"), row("b") | {"data_source": None}], "1 row whose data_source is no text"),
        ([row("a"), row(" \n")], "1 row with an empty prompt"),
        ([row("a"), row(None)], "1 row without a prompt; the first: the content of"),
        ([row("a"), row("b", 2), row("c", "3")], r"known have several types: str \(2\), int \(1\)"),
        ([row("a"), row("b", None)], r"1 row without a ground truth \(null, NaN, empty or"),
        ([row("a"), row("b", "")], r"1 row without a ground truth"),
        ([row("a"), row("b", float("nan"))], "of data_source known: row 1 of"),
    ],
)
def test_problems(write_jsonl: WriteJsonl, rows: list[Row], problem: str) -> None:
    found = check(write_jsonl(rows))
    assert len(found.problems) == 1
    with pytest.raises(DataError, match=problem):
        raise DataError(found.problems[0])
    assert "no problems found" not in shown(found)


def test_what_the_template_cannot_render_is_a_problem(
    write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    wrong = row("a") | {"prompt": [{"role": "forbidden", "content": "a"}]}
    found = check(write_jsonl([row("abc"), wrong]), tokenizer=tokenizer)
    assert found.tokens == [5]
    assert found.problems == ["1 row that the chat template cannot render"]


def test_a_reward_model_needs_no_ground_truth(write_jsonl: WriteJsonl) -> None:
    judged = row("a") | {"reward_model": {"style": "model", "ground_truth": None}}
    assert check(write_jsonl([judged])).problems == []


def test_bins_cover_every_length_once() -> None:
    assert list(histogram([7])) == [(7, 7, 1)]
    bins = list(histogram([1, 2, 2, 50, 90]))
    assert sum(count for _, _, count in bins) == 5
    assert (bins[0][0], bins[-1][1]) == (1, 90)
    assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(bins))
