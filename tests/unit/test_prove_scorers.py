"""The script that proves scorers on whole data sets, on a few rows."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOLUTIONS = [
    r"Half of it is $\boxed{\dfrac{1}{2}}$." + "\n" + r"#### \frac{1}{2}",
    r"It has $\boxed{12\text{ sides}}$." + "\n#### 12",
]
WRONG = "It is $\\boxed{3}$.\n#### 4"


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify, the extra math"
)
@pytest.mark.parametrize("wrong", [False, True])
def test_the_script(tmp_path: Path, wrong: bool) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "math").mkdir()
    shutil.copy(ROOT / "tests/data/scorers/gsm8k.jsonl", tmp_path / "gsm8k" / "train.jsonl")
    solutions = [*SOLUTIONS, WRONG] if wrong else SOLUTIONS
    lines = [json.dumps({"problem": "?", "solution": solution}) for solution in solutions]
    (tmp_path / "math" / "math500.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "scripts/prove_scorers.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == int(wrong), done.stderr
    assert "gsm8k, strict, on GSM8K train: 37 of 37 reference solutions" in done.stdout
    assert f"math on MATH-500: 2 of {len(solutions)} reference solutions" in done.stdout
    assert ("row 2: answer '4', solution ends 'It is $\\\\boxed{3}$.\\n'" in done.stdout) == wrong
