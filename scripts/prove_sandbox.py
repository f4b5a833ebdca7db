"""Every reference solution of HumanEval and MBPP against its tests, in the sandbox.

Usage: python scripts/prove_sandbox.py FOLDER [--slots N]

FOLDER holds humaneval/HumanEval.jsonl.gz and mbpp/mbpp.jsonl as their publishers wrote them. Prints
how many pass, names those that do not, and runs each problem with an empty solution as well, which
must fail.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from caldera.data.prepare.programming import helpers_of
from caldera.sandbox import Limits, Outcome, Sandbox


@dataclass(frozen=True)
class Problem:
    name: str
    solution: str
    empty_solution: str
    tests: str


def humaneval(folder: Path) -> Iterator[Problem]:
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            helpers = helpers_of(row["prompt"], row["entry_point"])
            tests = f"{helpers}{row['test']}\ncheck({row['entry_point']})\n"
            solution = row["prompt"] + row["canonical_solution"]
            yield Problem(row["task_id"], solution, f"{row['prompt']}    return None\n", tests)


def mbpp(folder: Path) -> Iterator[Problem]:
    with (folder / "mbpp" / "mbpp.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            tests = [row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]]
            yield Problem(f"MBPP/{row['task_id']}", row["code"], "", "\n".join(tests))


def prove(name: str, problems: list[Problem], sandbox: Sandbox) -> None:
    def both(problem: Problem) -> tuple[Outcome, Outcome]:
        return (
            sandbox.check(problem.solution, problem.tests),
            sandbox.check(problem.empty_solution, problem.tests),
        )

    start = time.perf_counter()
    with ThreadPoolExecutor(sandbox.slots) as threads:
        outcomes = list(threads.map(both, problems))
    seconds = time.perf_counter() - start
    passed = sum(solved.ok for solved, _ in outcomes)
    fooled = sum(empty.ok for _, empty in outcomes)
    print(f"{name}: {passed} of {len(problems)} reference solutions pass, {fooled} empty ones;")
    print(f"  {2 * len(problems)} checks in {seconds:.1f} s, {sandbox.isolation}")
    for problem, (solved, empty) in zip(problems, outcomes, strict=True):
        if not solved.ok or empty.ok:
            last = solved.stderr.strip().rpartition("\n")[2]
            print(f"  {problem.name}: {solved.status}: {solved.raised or last}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    with Sandbox(Limits(wall_seconds=30, cpu_seconds=30), arguments.slots) as sandbox:
        prove("HumanEval", list(humaneval(arguments.folder)), sandbox)
        prove("MBPP", list(mbpp(arguments.folder)), sandbox)


if __name__ == "__main__":
    main()
