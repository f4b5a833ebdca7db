"""What a plain installation, without extras, can do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab, Lessons

LAUNCHER = Path(__file__).parents[1] / "core_install.py"
IMPORT_ALL = """
import importlib, json, pkgutil, caldera
absent = {}
for module in pkgutil.walk_packages(caldera.__path__, "caldera."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        absent[module.name] = error.name.partition(".")[0]
print(json.dumps(absent))
"""
NEED_EXTRAS = {
    "caldera.agent_loop.react_graph": "langchain_core",
    "caldera.engine.megatron.": "megatron",
    "caldera.models.exact_cuda": "triton",
    "caldera.models.triton_": "triton",
    "caldera.reward_score.symbolic_server": "math_verify",
    "caldera.rollout.native.cuda.": "triton",
}
"""Modules, by the beginning of their names, that are imported where their library is needed."""


def run(lab: Lab, *arguments: str) -> str:
    """The output of a module, or of code, that ends well."""
    done = subprocess.run(
        [sys.executable, LAUNCHER, *arguments], env=lab.environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_other_modules_can_be_imported(lab: Lab) -> None:
    absent: dict[str, str] = json.loads(run(lab, "-c", IMPORT_ALL).splitlines()[-1])
    unexpected = {
        name: library
        for name, library in absent.items()
        if not any(
            name.startswith(known) and library == NEED_EXTRAS[known] for known in NEED_EXTRAS
        )
    }
    assert unexpected == {}
    assert "caldera.reward_score.symbolic_server" in absent, "nothing was left out"


def test_training(lab: Lab, tmp_path: Path) -> None:
    arguments = lab.overrides(tmp_path, "trainer.total_training_steps=1", "trainer.test_freq=1")
    run(lab, "caldera.trainer.main_ppo", *arguments)
    assert (tmp_path / "metrics.jsonl").is_file()


def test_fine_tuning(lab: Lab, lessons: Lessons, tmp_path: Path) -> None:
    run(lab, "caldera.cli", "sft", *lessons.overrides(tmp_path, "trainer.total_epochs=1"))
    assert (tmp_path / "metrics.jsonl").is_file()


def test_the_demo(lab: Lab, tmp_path: Path) -> None:
    steps = "trainer.total_training_steps=1"
    run(lab, "caldera.cli", "demo", "--output", str(tmp_path / "demo"), steps)
    assert list(tmp_path.rglob("metrics.jsonl"))


API = """
import sys
import caldera

rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
run = caldera.grpo(
    sys.argv[-1], rows, lambda response, answer: float(response == answer), n=4, steps=1,
    batch_size=5, max_prompt_length=6, max_response_length=4, output="run",
)
print(run.train().generate(["1+1"]))
"""


def test_the_python_api(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(lab, "-c", API, str(lab.model)).strip().endswith("']")
