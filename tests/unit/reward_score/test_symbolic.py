"""Symbolic equality, its limits, and the two scorers that stand on it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from caldera.errors import ConfigError, RewardError
from caldera.installation import install_command
from caldera.reward_score import default_compute_score, geo3k, prime_math, symbolic

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify, the extra math"
)


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("1+x", "x+1", True),
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\frac{2}{\sqrt{2}}", r"\sqrt{2}", True),
        (r"\left(3,\pi/2\right)", r"(3,\frac{\pi}{2})", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        ("[0,1]", "[0,1)", False),
        ("3.15", r"\pi", False),
        ("x-1", "x+1", False),
        ("", "1", False),
        (r"\frac{1}{", "1", False),
        (r"\begin{pmatrix}", "1", False),
        ("\ud800", "1", False),
        ("\n\0", "1", False),
    ],
)
def test_equal(answer: str, reference: str, same: bool) -> None:
    assert symbolic.equal(answer, reference, cpu_seconds=5) == same


@needs_math_verify
@pytest.mark.parametrize(
    "hostile",
    [
        "9^{9^{9^{9}}}",  # one multiplication in C, which no Python signal handler interrupts
        "1000000!!",
        r"\sum_{n=1}^{1000000000} \sin(n)",
        "(" * 2000 + "1" + ")" * 2000,
        "{" * 3000,
    ],
)
def test_a_hostile_expression_ends_by_its_limits(hostile: str) -> None:
    assert not symbolic.equal(hostile, "3", cpu_seconds=0.1)
    assert symbolic.equal("2/4", "1/2", cpu_seconds=5), "the next comparison is not harmed"


@needs_math_verify
def test_threads_get_their_own_answers() -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: symbolic.equal(f"{i}/2", "1", cpu_seconds=5), range(8)))
    assert answers == [i == 2 for i in range(8)]


def _ask(answers: Any) -> None:
    answers.put(symbolic.equal("3/6", "1/2", cpu_seconds=5))


@needs_math_verify
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_server_of_its_own() -> None:
    assert symbolic.equal("2/4", "1/2", cpu_seconds=5)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_ask, args=(answers,), daemon=True)
    child.start()
    assert answers.get(timeout=50) is True
    child.join()
    assert child.exitcode == 0
    assert symbolic.equal("2/4", "1/2", cpu_seconds=5)


@needs_math_verify
def test_a_server_that_was_killed_is_told_and_replaced() -> None:
    assert symbolic.equal("2/4", "1/2", cpu_seconds=5)
    process = symbolic._servers[0].process
    process.kill()
    process.wait()
    with pytest.raises(RewardError, match=f"status -{int(signal.SIGKILL)}"):
        symbolic.equal("2/4", "1/2", cpu_seconds=5)
    assert symbolic.equal("2/4", "1/2", cpu_seconds=5)


@pytest.mark.parametrize("scorer", [prime_math, geo3k])
def test_without_math_verify_the_error_names_the_extra(
    scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbolic.require_math_verify.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("math"))):
        scorer.compute_score("no box at all", "1")


@needs_math_verify
@pytest.mark.parametrize(
    ("solution", "ground_truth", "score"),
    [
        (r"so \boxed{0.25}", r"\frac{1}{4}", 1.0),
        (r"so \boxed{1/4}", r"$\boxed{\frac{1}{4}}$", 1.0),
        (r"so \boxed{\text{Saturday}}", r"\text{Saturday}", 1.0),
        (r"\boxed{1/4} or rather \boxed{1/3}", r"\frac{1}{4}", 0.0),
        (r"\boxed{", "1", 0.0),
        ("the answer is 1/4", r"\frac{1}{4}", 0.0),
        (r"\boxed{4}", 4, 1.0),
    ],
)
def test_prime_math(solution: str, ground_truth: object, score: float) -> None:
    assert prime_math.compute_score(solution, ground_truth, cpu_seconds=5) == score


@needs_math_verify
@pytest.mark.parametrize(
    ("solution", "score"),
    [
        (r"<think>half of 9</think> It is \boxed{4.5}.", 1.0),
        (r"  <think>half of 9</think>\boxed{9/2}" + "\n", 1.0),
        (r"It is \boxed{4.5}.", 0.9),
        (r"<think>half of 9: \boxed{4.5}</think>", 0.9),
        (r"<think>half of 9</think> It is \boxed{5}.", 0.1),
        (r"<think>half of 9</think> It is 4.5.", 0.0),
        ("", 0.0),
    ],
)
def test_geo3k(solution: str, score: float) -> None:
    assert geo3k.compute_score(solution, r"\frac{9}{2}", cpu_seconds=5) == pytest.approx(score)


@needs_math_verify
def test_they_serve_their_data_sources() -> None:
    subsets = ["aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads"]
    for name in subsets:
        assert default_compute_score(f"numina_{name}", r"\boxed{1}", "1") == 1.0
    assert default_compute_score("hiyouga/geometry3k", r"\boxed{1}", "1") == 0.9
