"""Code problems, from the manager's default score function to a verdict of the sandbox."""

from __future__ import annotations

import json

import pytest

from caldera.reward.default import score_by_data_source

SQUARE = "Here it is:\n```python\ndef square(x):\n    return {body}\n```"
READS = "```python\nprint(int(input()) ** {power})\n```"


@pytest.mark.parametrize(
    ("answer", "tests", "score"),
    [
        (SQUARE.format(body="x * x"), {"assert_case": ["assert square(3) == 9"]}, 1.0),
        (SQUARE.format(body="x + x"), {"assert_case": ["assert square(3) == 9"]}, 0.0),
        (SQUARE.format(body="exit(0)"), {"assert_case": ["assert square(3) == 9"]}, 0.0),
        (READS.format(power=2), {"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]}, 1.0),
        (READS.format(power=3), {"inputs": ["1\n", "4\n"], "outputs": ["1\n", "16\n"]}, 0.5),
        (SQUARE.format(body="x * x"),
         {"inputs": [[3], [2]], "outputs": [9, 4], "fn_name": "square"}, 1.0),
    ],
    ids=["asserts", "wrong", "ends early", "stdin", "half of it", "function"],
)  # fmt: skip
def test_programs_are_tested_in_the_sandbox(
    answer: str, tests: dict[str, object], score: float
) -> None:
    verdict = score_by_data_source("apps", answer, json.dumps(tests))
    assert isinstance(verdict, dict)
    assert verdict["score"] == pytest.approx(score)
    assert verdict["acc"] == (score == 1.0)
