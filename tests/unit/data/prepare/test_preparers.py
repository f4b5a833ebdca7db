"""Each data set, from the slices of raw files that come with the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from caldera.data.prepare import PREPARERS, prepare
from caldera.data.prepare.mathematics import boxed_answer
from caldera.errors import DataError

RAW = Path(__file__).parents[3] / "data/raw"
COLUMNS = {"data_source", "prompt", "ability", "reward_model", "extra_info"}
COUNTS = {
    "aime": {"test": 2},
    "apps": {"train": 2, "test": 1},
    "dapo_math": {"train": 3},
    "gsm8k": {"train": 24, "test": 12},
    "hh_rlhf": {"train": 2, "test": 1},
    "humaneval": {"test": 6},
    "math": {"train": 3, "test": 2},
    "mbpp": {"train": 4, "validation": 4, "test": 5},
    "search_qa": {"train": 32, "test": 4},
    "search_qa_tags": {"train": 32, "test": 4},
}

Rows = list[dict[str, Any]]
Prepare = Callable[[str], dict[str, Rows]]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """The rows of each split of a data set."""

    def run(name: str) -> dict[str, Rows]:
        files = prepare(name, raw=RAW / name.removesuffix("_tags"), output=tmp_path / name)
        return {file.stem: pq.read_table(file).to_pylist() for file in files}

    return run


def truth(row: dict[str, Any]) -> Any:
    return row["reward_model"]["ground_truth"]


def said(row: dict[str, Any]) -> str:
    content: str = row["prompt"][-1]["content"]
    return content


def test_every_data_set_has_a_slice() -> None:
    assert PREPARERS.names() == sorted(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_rows_have_the_schema_of_verl(prepared: Prepare, name: str) -> None:
    splits = prepared(name)
    assert {split: len(rows) for split, rows in splits.items()} == COUNTS[name]
    for split, rows in splits.items():
        assert all(row.keys() >= COLUMNS for row in rows)
        assert {row["extra_info"]["split"] for row in rows} == {split}
        indices = [row["extra_info"]["index"] for row in rows]
        assert indices == sorted(set(indices))
        for row in rows:
            assert row["prompt"][-1]["role"] == "user" and said(row)
            assert row["reward_model"]["style"] in ("rule", "model") and truth(row)


def test_gsm8k(prepared: Prepare) -> None:
    splits = prepared("gsm8k")
    row = splits["train"][0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["extra_info"]["question"].startswith("Natalia sold clips to 48")
    assert said(row) == (
        row["extra_info"]["question"]
        + ' Let\'s think step by step and output the final answer after "####".'
    )
    assert [truth(row) for row in splits["test"][:3]] == ["18", "3", "70000"]
    assert row["extra_info"]["answer"].endswith("#### 72") and truth(row) == "72"


def test_math(prepared: Prepare) -> None:
    splits = prepared("math")
    assert [truth(row) for row in splits["train"]] == ["23", r"\frac{1}{6}", r"\{-3, 3\}"]
    assert [truth(row) for row in splits["test"]] == ["1024", "3"]
    assert {row["data_source"] for row in splits["train"]} == {"DigitalLearningGmbH/MATH-lighteval"}
    assert {row["data_source"] for row in splits["test"]} == {"HuggingFaceH4/MATH-500"}
    assert said(splits["test"][0]) == (
        "What is $2^{10}$? Let's think step by step and output the final answer within \\boxed{}."
    )
    assert splits["train"][0]["extra_info"]["subject"] == "Prealgebra"


def test_boxes() -> None:
    assert boxed_answer(r"\boxed{1} then \fbox{\left\{ x : x > \frac{1}{2} \right.}") == (
        r"\left\{ x : x > \frac{1}{2} \right."
    )
    with pytest.raises(DataError, match=r"no \\boxed"):
        boxed_answer("42")
    with pytest.raises(DataError, match="not closed"):
        boxed_answer(r"\boxed{\frac{1}{2}")


def test_aime(prepared: Prepare) -> None:
    rows = prepared("aime")["test"]
    assert [truth(row) for row in rows] == ["33", "25"]
    assert [row["data_source"] for row in rows] == ["aime2024", "aime2025"]
    assert "Answer: $Answer" in said(rows[0]) and "modulo $991$" in said(rows[0])


def test_dapo_math_holds_each_prompt_once(prepared: Prepare) -> None:
    rows = prepared("dapo_math")["train"]
    assert [truth(row) for row in rows] == ["42", "10", "144"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 2, 3]
    assert {row["data_source"] for row in rows} == {"math_dapo"}
    assert said(rows[0]) == 'Give the sum of 17 and 25 after "Answer:".'
    assert all("Answer: $Answer" in said(row) for row in rows[1:])


def test_search_qa_has_what_the_search_tool_needs(prepared: Prepare) -> None:
    splits = prepared("search_qa")
    row = splits["train"][0]
    assert row["data_source"] == "searchR1_hotpotqa"
    assert row["prompt"][0]["role"] == "system"
    assert truth(row) == {"target": ["a spirit"]}
    assert row["extra_info"]["need_tools_kwargs"] is True
    assert row["extra_info"]["tools_kwargs"] == {
        "search": {
            "create_kwargs": {
                "ground_truth": {"target": ["a spirit"]},
                "question": "If Gallu is a demon Lilu is what?",
                "data_source": "searchR1_hotpotqa",
            }
        }
    }
    for tag in ("think", "tool_call", "tool_response", "answer"):
        assert f"<{tag}>" in said(row) and f"</{tag}>" in said(row)
    questions = {split: {said(row) for row in rows} for split, rows in splits.items()}
    assert not questions["train"] & questions["test"]


def test_search_qa_tags(prepared: Prepare) -> None:
    row = prepared("search_qa_tags")["train"][0]
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in said(row) and f"</{tag}>" in said(row)
    assert said(row).endswith("Question: If Gallu is a demon Lilu is what?\n")
    assert "tools_kwargs" not in row["extra_info"]


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_the_reference_solutions_pass_the_tests_and_wrong_ones_do_not(
    prepared: Prepare, name: str
) -> None:
    for row in (row for rows in prepared(name).values() for row in rows):
        cases = json.loads(truth(row))["assert_case"]
        for case in cases:
            exec(f"{row['extra_info']['answer']}\n{case}", {})
        with pytest.raises((AssertionError, NameError, TypeError)):
            exec(cases[0], {})


def test_code_prompts(prepared: Prepare) -> None:
    row = prepared("humaneval")["test"][0]
    assert row["extra_info"]["task_id"] == "HumanEval/0"
    assert "```python\nfrom typing import List" in said(row)
    splits = prepared("mbpp")
    tasks = {s: [row["extra_info"]["task_id"] for row in rows] for s, rows in splits.items()}
    assert tasks == {
        "train": [601, 602, 603, 927],
        "validation": [511, 512, 599, 600],
        "test": [11, 12, 13, 509, 510],
    }
    assert "assert remove_Occ(" in said(splits["test"][0])
    with_setup = json.loads(truth(splits["train"][-1]))["assert_case"]
    assert len(with_setup) == 3 and all("root = Node(1)" in case for case in with_setup)


def test_apps_leaves_out_problems_without_tests(prepared: Prepare) -> None:
    program, function = prepared("apps")["train"]
    assert json.loads(truth(program)) == {"inputs": ["3\n", "5\n"], "outputs": ["9\n", "25\n"]}
    assert json.loads(truth(function)) == {
        "inputs": [[1, 2], [7, 4]],
        "outputs": [2, 7],
        "fn_name": "larger",
    }
    assert "standard input" in said(program) and "standard input" not in said(function)
    assert "def larger(a, b):" in said(function)


def test_hh_rlhf_gives_prompts_and_pairs(prepared: Prepare) -> None:
    first, second = prepared("hh_rlhf")["train"]
    assert first["prompt"] == [
        {"role": "user", "content": "What goes well with rice?"},
        {"role": "assistant", "content": "Beans do. Do you eat meat?"},
        {"role": "user", "content": "No."},
    ]
    answer = "Then try lentils.\n\nThey cook in twenty minutes."
    assert first["chosen"] == [{"role": "assistant", "content": answer}]
    assert first["rejected"] == [{"role": "assistant", "content": "I do not know."}]
    assert first["reward_model"] == {"style": "model", "ground_truth": answer}
    assert second["rejected"] == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("name", "file", "raw", "message"),
    [
        ("gsm8k", "train.jsonl", {"question": "1?", "answer": "1"}, "no number after '#### '"),
        ("gsm8k", "train.jsonl", {"answer": "#### 1"}, "no text in the column 'question'"),
        ("aime", "test.jsonl", {"problem": "1?", "answer": "x"}, "'x' is not a whole number"),
        ("math", "train.jsonl", {"problem": "1?"}, "no text in the column 'solution'"),
        ("mbpp", "mbpp.jsonl", {"task_id": 601, "text": "a"}, "'test_list' must be a list"),
        (
            "search_qa",
            "train.jsonl",
            {"source": "nq", "question": "a", "answers": "b"},
            "must be a list of strings",
        ),
    ],
)
def test_a_raw_row_of_another_kind_is_named(
    tmp_path: Path, name: str, file: str, raw: dict[str, Any], message: str
) -> None:
    (tmp_path / file).write_text(json.dumps(raw))
    with pytest.raises(DataError, match=f"row 0 of .*{file}: .*{message}"):
        prepare(name, raw=tmp_path, output=tmp_path / "out")
