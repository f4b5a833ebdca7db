"""`caldera eval` on real files, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from tests.conftest import WarmPython

Evaluate = Callable[..., subprocess.CompletedProcess[str]]

GSM8K, DAPO = "openai/gsm8k", "math_dapo"


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def row(source: str, number: int, *answers: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"What is {number}?"}],
        "data_source": source,
        "reward_model": {"ground_truth": str(number)},
        "responses": list(answers),
    }


@pytest.fixture
def evaluate(warm: WarmPython) -> Evaluate:
    def run(*arguments: str, module: str = "caldera.cli") -> subprocess.CompletedProcess[str]:
        given = ["eval", *arguments] if module == "caldera.cli" else list(arguments)
        return subprocess.run(
            warm.command(module, *given), capture_output=True, text=True, check=False,
            timeout=200, env={**os.environ, "COLUMNS": "120"},
        )  # fmt: skip

    return run


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    rows = [
        row(GSM8K, i, f"#### {i}", f"#### {i + i % 2}", "no idea", "#### 0") for i in range(1, 9)
    ]
    rows += [row(DAPO, i, *[f"Answer: {i}"] * 3, "Answer: 0") for i in range(1, 5)]
    return write(tmp_path / "out.parquet", rows)


def test_a_file_is_scored_by_its_data_sources(evaluate: Evaluate, answers: Path) -> None:
    done = evaluate(f"data.path={answers}", module="caldera.trainer.main_eval")
    assert done.returncode == 0, done.stderr
    found = json.loads((answers.parent / "out.evaluation.json").read_text())
    gsm8k = found[GSM8K]
    assert (gsm8k["prompts"], gsm8k["answers"], gsm8k["failed"]) == (8, 32, 0)
    measures = gsm8k["measures"]
    assert measures["mean@4"]["value"] == pytest.approx((4 * 0.25 + 4 * 0.5) / 8)
    assert measures["pass@4"]["value"] == 1
    assert measures["pass@1"]["value"] == measures["mean@4"]["value"]
    # even prompts have two equal right answers against two others; odd ones have four that differ
    assert measures["maj@4"]["value"] == pytest.approx((4 * 1 + 4 * 0.25) / 8)
    assert found[DAPO]["measures"]["maj@4"]["value"] == 1  # three of four agree, and score 1
    assert found[DAPO]["measures"]["mean@4"]["value"] == pytest.approx(0.5)  # -1 for the fourth
    assert measures["parsed"]["value"] == pytest.approx(0.75)  # all but "no idea"
    assert measures["parsed"]["low"] == measures["parsed"]["high"] == pytest.approx(0.75)
    assert found[DAPO]["measures"]["parsed"]["value"] == 1
    assert f"'test_score/{GSM8K}': 0.375" in done.stdout
    assert "pass@4" in done.stdout and "8 prompts, 32 responses" in done.stdout
    page = (answers.parent / "out.evaluation.html").read_text()
    assert page.count("<article") == 32 - 12 + 4 and "no idea" in page


def test_a_function_of_ones_own_may_fail_or_hang(
    evaluate: Evaluate, answers: Path, tmp_path: Path
) -> None:
    function = tmp_path / "own.py"
    function.write_text(
        "import time\n"
        "def compute_score(source, text, truth):\n"
        "    if text == '#### 1': raise ValueError('odd <one>')\n"
        "    if text == '#### 3': time.sleep(1000)\n"
        "    return {'score': 0.5, 'acc': text == f'#### {truth}'}\n"
    )
    done = evaluate(
        f"data.path={answers}", f"custom_reward_function.path={function}", "evaluation.timeout=4",
        f"evaluation.output_dir={tmp_path / 'results'}", "evaluation.shown_answers=100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results/out.evaluation.json").read_text())[GSM8K]
    assert found["failed"] == 2
    assert "maj@4" not in found["measures"]  # nobody knows what an answer says
    page = (tmp_path / "results/out.evaluation.html").read_text()
    assert "odd &lt;one&gt;" in page and "timed_out" in page
    assert "2 could not be scored" in done.stdout


def test_two_files_are_compared(evaluate: Evaluate, tmp_path: Path) -> None:
    better = write(tmp_path / "new.parquet", [row(GSM8K, i, f"#### {i}") for i in range(1, 13)])
    worse = write(
        tmp_path / "old.parquet",
        [row(GSM8K, i, f"#### {i}" if i > 8 else "#### 0") for i in range(1, 13)],
    )
    done = evaluate(f"data.path={better}", f"data.compare_path={worse}")
    assert done.returncode == 0, done.stderr
    comparison = json.loads((tmp_path / "new.evaluation.json").read_text())[GSM8K]["comparison"]
    assert comparison["difference"]["value"] == pytest.approx(8 / 12)
    assert comparison["p_value"] == pytest.approx(2 / 2**8)
    assert (comparison["better"], comparison["worse"]) == (8, 0)
    assert "paired permutation test" in done.stdout
    shifted = write(tmp_path / "x.parquet", [row(GSM8K, i, "a") for i in range(2, 14)])
    refused = evaluate(f"data.path={better}", f"data.compare_path={shifted}")
    assert refused.returncode == 2 and "its row 0 has another prompt" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "data.path is missing"),
        (("data.path=nowhere.parquet",), "data.path: "),
        (("data.path=FILE", "data.response_key=answer"), "data.response_key"),
        (("data.path=FILE", "data.respons_key=x"), "data.response_key"),
    ],
)
def test_mistakes_are_told(
    evaluate: Evaluate, answers: Path, arguments: tuple[str, ...], told: str
) -> None:
    done = evaluate(*(argument.replace("FILE", str(answers)) for argument in arguments))
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr
