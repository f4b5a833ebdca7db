"""The page of a run's folder: what is read from it, and how it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from caldera.errors import DataError
from caldera.storage.writing import write_text_atomic
from caldera.tracking.curves import Series, svg_curve
from caldera.tracking.dumps import read_jsonl

PHASES = {
    "gen": "Sampling responses",
    "reward": "Scoring responses",
    "old_log_prob": "Log-probabilities of the policy",
    "ref": "Log-probabilities of the reference",
    "values": "Values of the critic",
    "adv": "Advantages",
    "update_critic": "Critic update",
    "update_actor": "Policy update",
    "save_checkpoint": "Saving checkpoints",
    "testing": "Validation",
}
"""The timed phases, in the order in which they happen."""

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
    """The time of one phase over the whole run."""

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
    """One sampled response of a validation dump."""

    text: str
    score: float | None
    correct: bool | None
    """By the scorer's `acc` where it gives one, else whether the score reaches 0.5."""


@dataclass(frozen=True)
class AnswerPair:
    """The model's responses to one prompt at the first and at the last validation."""

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
    """The responses of the first and the last validation dump, matched by prompt."""

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
            pairs.append(AnswerPair(prompt, shown, _read_answer(row), _read_answer(after)))
    return ValidationAnswers(first, last, pairs)


def _read_answer(row: dict[str, Any]) -> Answer:
    score = row.get("score")
    number = float(score) if isinstance(score, int | float) else None
    judged = row.get("acc", number)
    correct = float(judged) >= 0.5 if isinstance(judged, int | float) else None
    return Answer(str(row.get("output", "")), number, correct)


SHOWN_ANSWERS = 12

CURVES = (
    ("critic/score/mean", "Mean training reward", "reward"),
    ("actor/entropy", "Entropy of the policy", "nats per token"),
    ("response_length/mean", "Length of the responses", "tokens"),
    ("actor/grad_norm", "Norm of the policy's gradient", "norm"),
)
OPTIONAL_CURVES = (
    ("actor/ppo_kl", "KL from the sampling policy", "nats per token"),
    ("training/rollout_probs_diff_mean", "Sampler against trainer", "probability difference"),
)


def write_report(run_dir: Path, out: Path, title: str, validation_dir: Path | None = None) -> None:
    """Build the report from `metrics.jsonl`, `config.yaml` and the validation dumps of a run."""
    metrics = read_metrics(run_dir / "metrics.jsonl")
    answers = read_validation_answers(validation_dir or run_dir / "validation")
    config = run_dir / "config.yaml"
    figures, missing = _curves(metrics)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["seconds"] = _seconds
    page = environment.from_string(_resource("report_template.html")).render(
        style=page_style(),
        title=title,
        cards=_cards(metrics),
        figures=figures,
        missing=missing,
        answers=answers,
        changes=[] if answers is None else [pair.score_change for pair in answers.pairs],
        shown=[] if answers is None else _most_changed(answers.pairs),
        timings=phase_times(metrics),
        config=config.read_text(encoding="utf-8") if config.is_file() else None,
    )
    write_text_atomic(out, [page, "\n"])


def inline_curves(metrics: RunMetrics) -> str:
    """The curves of a run so far as HTML to be shown within another page, such as a notebook."""
    figures, _ = _curves(metrics)
    return f"<div>{''.join(figures)}</div>"


def page_style() -> str:
    """The style sheet of every page that Caldera writes."""
    return _resource("page.css")


def _resource(name: str) -> str:
    return files("caldera.tracking").joinpath(name).read_text("utf-8")


class Card(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    note: str
    kind: str = "card"


def _cards(metrics: RunMetrics) -> list[Card]:
    keys = validation_keys(metrics)
    cards = [_validation_card(source, key, metrics) for source, key in keys.items()]
    if not keys:
        cards.append(Card("Validation", "none", "no validation was logged"))
    if len(keys) > 1:  # several data sources take a separate row
        cards.append(Card("", "", "", "break"))
    seconds = metrics.values("timing_s/step")
    tokens = metrics.values("perf/total_num_tokens")
    throughput = metrics.values("perf/throughput")
    last_step = max(metrics.rows, default=0)
    cards.append(Card("Training steps", f"{last_step:,}", f"{len(metrics.rows):,} rows of metrics"))
    if seconds:
        per_step = f"{_seconds(sum(seconds) / len(seconds))} a step"
        cards.append(Card("Training time", _duration(sum(seconds)), per_step))
    if seconds and tokens and sum(seconds) > 0:
        speed = f"{sum(tokens) / sum(seconds):,.0f}"
        cards.append(Card("Tokens per second", speed, "prompts and responses, all devices"))
    elif throughput:
        speed = f"{sum(throughput) / len(throughput):,.0f}"
        cards.append(Card("Tokens per second", speed, "on each device"))
    return cards


def _validation_card(source: str, key: str, metrics: RunMetrics) -> Card:
    points = metrics.points(key)
    (first_step, first), (last_step, last) = points[0], points[-1]
    change = last - first
    if "/acc/" in key:
        label, shown = "accuracy", (f"{first:.1%}", f"{last:.1%}")
        gain = f"{change * 100:+.1f} points"
    else:
        label, shown = "reward", (f"{first:.3g}", f"{last:.3g}")
        gain = f"{change:+.3g}"
    if len(points) == 1:
        return Card(f"Validation {label}", shown[0], f"{source}, step {first_step:.0f} only")
    steps = f"{source}, steps {first_step:.0f} to {last_step:.0f}"
    return Card(f"Validation {label}", " → ".join(shown), f"{gain} · {steps}", "card wide")


def _curves(metrics: RunMetrics) -> tuple[list[Markup], list[str]]:
    """(charts, metrics that were not logged)."""
    figures: list[Markup] = []
    missing: list[str] = []
    if keys := validation_keys(metrics):
        series = [Series(key, metrics.points(key)) for key in keys.values()]
        if all("/acc/" in key for key in keys.values()):
            best = max(value for s in series for _, value in s.points)
            y_range = (0.0, min(1.0, best * 1.15) or 1.0)
            figures.append(_figure(series, "Validation accuracy", "accuracy", y_range))
        else:
            figures.append(_figure(series, "Validation score", "score"))
    else:
        missing.append("val-core/*")
    for key, title, unit in CURVES + OPTIONAL_CURVES:
        if points := metrics.points(key):
            figures.append(_figure([Series(key, points)], title, unit))
        elif (key, title, unit) in CURVES:
            missing.append(key)
    return figures, missing


def _figure(
    series: list[Series], title: str, unit: str, y_range: tuple[float, float] | None = None
) -> Markup:
    return Markup(svg_curve(series, title, "step", unit, width=480, height=280, y_range=y_range))


def _most_changed(pairs: Iterable[AnswerPair]) -> list[AnswerPair]:
    """One pair a prompt, changed ones before unchanged ones."""
    one_each: dict[str, AnswerPair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.rank):
        one_each.setdefault(pair.prompt, pair)
    return list(one_each.values())[:SHOWN_ANSWERS]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _duration(seconds: float) -> str:
    """The two largest units: `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600:,} h {whole // 60 % 60:02} min"
