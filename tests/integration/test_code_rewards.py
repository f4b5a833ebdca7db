"""Code problems, from the default score function to a verdict of a sandbox, here or elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from caldera.config.reward import SandboxFusionConfig
from caldera.errors import ConfigError, RewardError
from caldera.reward.default import default_score_function
from caldera.sandbox import fusion

SQUARE = "Here it is:\n```python\ndef square(x):\n    return {body}\n```"
READS = "```python\nprint(int(input()) ** {power})\n```"
MEMORY = "```python\nkept = 'x' * (400 * 2**20)\nprint(len(kept) // 2**20)\n```"
HUNDREDS = {"inputs": [""], "outputs": ["400\n"]}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of `caldera sandbox serve`, in a process of its own."""
    command = [sys.executable, "-m", "caldera.cli", "sandbox", "serve", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split("/run_code")[0]
        process.send_signal(signal.SIGINT)


@pytest.fixture(params=["here", "server"])
def place(request: pytest.FixtureRequest) -> str | None:
    return str(request.getfixturevalue("address")) if request.param == "server" else None


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
    place: str | None, answer: str, tests: dict[str, object], score: float
) -> None:
    verdict = default_score_function(SandboxFusionConfig(url=place))(
        "apps", answer, json.dumps(tests)
    )
    assert isinstance(verdict, dict)
    assert verdict["score"] == pytest.approx(score)
    assert verdict["acc"] == (score == 1.0)


FORGED_RESULTS = {
    "nothing": "",
    "no function": "print(8)",
    "the mark": "print('\\n----- caldera: result -----\\n7')\nimport os\nos._exit(0)",
    "the mark at the end": "import atexit\n"
    "atexit.register(print, '\\n----- caldera: result -----\\n7')\n"
    "def pow(a, b):\n    return 7",
    "json": "import json\njson.dumps = lambda value: 'true'\ndef pow(a, b):\n    return 7",
    "equal": "class Right(int):\n    def __eq__(self, other):\n        return True\n"
    "def pow(a, b):\n    return Right(7)",
    "beyond floats": "def pow(a, b):\n    return 10**400",
    "much": "def pow(a, b):\n    return [8] * 10**6",
    "StopIteration": "def pow(a, b):\n    raise StopIteration",
    "SystemExit": "def pow(a, b):\n    raise SystemExit(0)",
}


@pytest.mark.parametrize("name", FORGED_RESULTS)
def test_results_of_functions_are_not_forged(place: str | None, name: str) -> None:
    score = default_score_function(SandboxFusionConfig(url=place))
    for wanted in (8, 8.0):
        truth = {"inputs": [[2, 3]], "outputs": [wanted], "fn_name": "pow"}
        answer = f"```python\n{FORGED_RESULTS[name]}\n```"
        assert score("apps", answer, json.dumps(truth)) == {"score": 0.0, "acc": 0.0}
        right = "```python\ndef pow(a, b):\n    return a ** b\n```"
        assert score("apps", right, json.dumps(truth))["score"] == 1.0


@pytest.mark.parametrize(("memory", "score"), [(1024, 1.0), (128, 0.0)])
def test_programs_have_the_memory_that_the_config_says(
    place: str | None, memory: int, score: float
) -> None:
    config = SandboxFusionConfig(url=place, max_concurrent=1, memory_limit_mb=memory)
    verdict = default_score_function(config)("apps", MEMORY, json.dumps(HUNDREDS))
    assert verdict["score"] == score


def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "FIRST_PAUSE_SECONDS", 0.001)
    score = default_score_function(SandboxFusionConfig(url="http://127.0.0.1:9"))
    with pytest.raises(RewardError, match=r"^no answer from http://127\.0\.0\.1:9/run_code: "):
        score("apps", MEMORY, json.dumps(HUNDREDS))


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"^reward_model\.sandbox_fusion: url='nowhere' is not"):
        default_score_function(SandboxFusionConfig(url="nowhere"))
