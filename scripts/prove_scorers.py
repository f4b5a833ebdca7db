"""Scorers on whole data sets: every reference solution earns full marks, another's only by chance.

Usage: python scripts/prove_scorers.py FOLDER

Reads FOLDER/gsm8k/train.jsonl (`question`, `answer` that ends in `#### N`) and
FOLDER/math/math500.jsonl (`problem`, `solution` that ends in `#### ANSWER`). Prints, for each
scorer, how many reference solutions earn full marks against their own answer, each that does not,
and how many do against the answer of another problem. Exits with status 1 if a reference solution
fails. The symbolic scorers need the extra `math`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from caldera.reward_score import gsm8k, hendrycks_math, prime_math

ANSWER_MARK = "####"
SHUFFLE_SEED = 0


class Problem(NamedTuple):
    row: int
    solution: str
    answer: str


class Proof(NamedTuple):
    name: str
    score: Callable[[str, Any], float]
    problems: Sequence[Problem]


def read_gsm8k(path: Path) -> list[Problem]:
    """Solutions whole, for the scorer looks for the mark itself."""
    solutions = [row["answer"] for row in read_rows(path)]
    return [
        Problem(row, solution, solution.rpartition(ANSWER_MARK)[2].strip())
        for row, solution in enumerate(solutions)
    ]


def read_math(path: Path) -> list[Problem]:
    """Solutions without the answer that this edition adds at their end: they have it in a box."""
    problems = []
    for row, fields in enumerate(read_rows(path)):
        solution, _, answer = fields["solution"].rpartition(ANSWER_MARK)
        problems.append(Problem(row, solution, answer.strip()))
    return problems


def read_rows(path: Path) -> list[dict[str, str]]:
    # Not splitlines(), which also splits at characters that JSON leaves as they are.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def prove(proof: Proof) -> bool:
    """Print what a scorer gives; whether every reference solution earns full marks."""
    failed = [p for p in proof.problems if proof.score(p.solution, p.answer) != 1.0]
    total = len(proof.problems)
    print(f"{proof.name}: {total - len(failed):,} of {total:,} reference solutions earn full marks")
    for problem in failed:
        end = problem.solution[-100:]
        print(f"  row {problem.row}: answer {problem.answer!r}, solution ends {end!r}")
    others = [problem.answer for problem in proof.problems]
    random.Random(SHUFFLE_SEED).shuffle(others)
    pairs = list(zip(proof.problems, others, strict=True))
    hits = sum(proof.score(problem.solution, other) == 1.0 for problem, other in pairs)
    alike = sum(problem.answer == other for problem, other in pairs)
    print(
        f"  against shuffled answers: {hits:,} ({hits / total:.2%}); "
        f"{alike:,} of those answers are the same text"
    )
    return not failed


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    word_problems = read_gsm8k(folder / "gsm8k" / "train.jsonl")
    competition = read_math(folder / "math" / "math500.jsonl")
    flexible = partial(gsm8k.compute_score, method="flexible")
    proofs = [
        Proof("gsm8k, strict, on GSM8K train", gsm8k.compute_score, word_problems),
        Proof("gsm8k, flexible, on GSM8K train", flexible, word_problems),
        Proof("math on MATH-500", hendrycks_math.compute_score, competition),
        Proof("prime_math on MATH-500", prime_math.compute_score, competition),
    ]
    results = [prove(proof) for proof in proofs]  # all of them, whichever fails
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
