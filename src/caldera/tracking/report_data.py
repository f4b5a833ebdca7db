"""What a report tells, read from the files that a run left."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caldera.errors import DataError
from caldera.tracking.dumps import read_jsonl

__all__ = [
    "PHASES",
    "Answer",
    "AnswerPair",
    "PhaseTime",
    "RunMetrics",
    "ValidationAnswers",
    "phase_times",
    "read_metrics",
    "read_validation_answers",
    "validation_keys",
]

PHASES = {
    "gen": "Sampling answers",
    "reward": "Scoring answers",
    "old_log_prob": "Log-probabilities of the policy",
    "ref": "Log-probabilities of the reference",
    "values": "Values of the critic",
    "adv": "Advantages",
    "update_critic": "Critic update",
    "update_actor": "Policy update",
    "save_checkpoint": "Saving checkpoints",
    "testing": "Validation",
}
"""What is timed, in the order in which it happens."""

AROUND_STEPS = ("save_checkpoint", "testing")
"""Phases that are not part of `timing_s/step`."""

VALIDATION_KEY = re.compile(r"val-core/(?P<source>.+)/(?P<variable>acc|reward)/mean@\d+")


@dataclass(frozen=True)
class RunMetrics:
    """The finite numbers of `metrics.jsonl`, one row a step, in the order of the steps."""

    rows: dict[int, dict[str, float]]

    def points(self, key: str) -> list[tuple[float, float]]:
        """(step, value) wherever the metric was logged."""
        return [(float(step), row[key]) for step, row in self.rows.items() if key in row]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.points(key)]


def read_metrics(path: Path) -> RunMetrics:
    """Read the file logger's rows; rows of the same step are joined, and the later value wins."""
    if not path.is_file():
        raise DataError(
            f"{path}: no metrics file, so there is nothing to report; "
            "a run writes it when trainer.logger contains 'file'"
        )
    rows: dict[int, dict[str, float]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        step, data = row.get("step"), row.get("data")
        if not isinstance(step, int) or not isinstance(data, dict):
            raise DataError(f"{path}: line {number} is not of the form {{'step': N, 'data': {{}}}}")
        numbers = {k: float(v) for k, v in data.items() if isinstance(v, int | float)}
        finite = {k: v for k, v in numbers.items() if math.isfinite(v)}
        rows.setdefault(step, {}).update(finite)
    return RunMetrics(dict(sorted(rows.items())))


def validation_keys(metrics: RunMetrics) -> dict[str, str]:
    """Data source -> the key of its accuracy, or of its reward where no accuracy was logged."""
    chosen: dict[str, str] = {}
    for key in sorted({key for row in metrics.rows.values() for key in row}):
        match = VALIDATION_KEY.fullmatch(key)
        if match is None:
            continue
        if match["variable"] == "acc" or match["source"] not in chosen:
            chosen[match["source"]] = key
    return chosen


@dataclass(frozen=True)
class PhaseTime:
    """What one phase took over the whole run."""

    name: str
    description: str
    count: int
    """In how many steps it ran."""
    mean_seconds: float
    """Over the steps in which it ran."""
    share: float
    """Of the time of all steps and what happens around them."""


def phase_times(metrics: RunMetrics) -> list[PhaseTime]:
    """The phases that were timed; what they leave of the steps' time comes last, as `other`."""
    steps = [row for row in metrics.rows.values() if "timing_s/step" in row]
    seconds = {
        phase: [row[f"timing_s/{phase}"] for row in steps if f"timing_s/{phase}" in row]
        for phase in PHASES
    }
    step_total = sum(row["timing_s/step"] for row in steps)
    step_total += sum(sum(seconds[phase]) for phase in AROUND_STEPS)
    phase_total = sum(map(sum, seconds.values()))
    # Phases that overlap can add up to more than the step.
    whole = max(step_total, phase_total)
    if whole <= 0:
        return []
    times = [
        PhaseTime(phase, PHASES[phase], len(taken), sum(taken) / len(taken), sum(taken) / whole)
        for phase, taken in seconds.items()
        if taken
    ]
    rest = whole - phase_total
    return [
        *times,
        PhaseTime("other", "Everything else", len(steps), rest / len(steps), rest / whole),
    ]


@dataclass(frozen=True)
class Answer:
    """One sampled answer of a validation dump."""

    text: str
    score: float | None
    correct: bool | None
    """By the scorer's `acc` where it gives one, else whether the score reaches 0.5."""


@dataclass(frozen=True)
class AnswerPair:
    """What the model answered to one prompt at the first and at the last validation."""

    prompt: str
    truth: str
    before: Answer
    after: Answer

    @property
    def score_change(self) -> float:
        return (self.after.score or 0.0) - (self.before.score or 0.0)

    @property
    def rank(self) -> int:
        """The more it changed, the sooner it is shown."""
        if self.score_change != 0:
            return 0
        return 1 if self.before.text != self.after.text else 2


@dataclass(frozen=True)
class ValidationAnswers:
    """The answers of the first and the last validation dump, matched by prompt."""

    first_step: int
    last_step: int
    pairs: list[AnswerPair]


def read_validation_answers(folder: Path) -> ValidationAnswers | None:
    """None where there is no dump at all; no pairs where there is only one."""
    steps = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    if first == last:
        return ValidationAnswers(first, last, [])
    later: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(folder / f"{last}.jsonl"):
        later.setdefault(str(row.get("input", "")), []).append(row)
    pairs: list[AnswerPair] = []
    for row in read_jsonl(folder / f"{first}.jsonl"):
        prompt = str(row.get("input", ""))
        # A prompt that is sampled several times appears as often: each is matched once, in order.
        if later.get(prompt):
            after = later[prompt].pop(0)
            truth = row.get("gts")
            shown = "" if truth is None else str(truth)
            pairs.append(AnswerPair(prompt, shown, _answer(row), _answer(after)))
    return ValidationAnswers(first, last, pairs)


def _answer(row: dict[str, Any]) -> Answer:
    score = row.get("score")
    number = float(score) if isinstance(score, int | float) else None
    judged = row.get("acc", number)
    correct = float(judged) >= 0.5 if isinstance(judged, int | float) else None
    return Answer(str(row.get("output", "")), number, correct)
