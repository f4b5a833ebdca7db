"""The report of a run: one HTML file that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from caldera.tracking.curves import Series, svg_curve
from caldera.tracking.dumps import write_text_atomic
from caldera.tracking.report_data import (
    Answer,
    AnswerPair,
    PhaseTime,
    RunMetrics,
    ValidationAnswers,
    phase_times,
    read_metrics,
    read_validation_answers,
    validation_keys,
)

__all__ = ["page_style", "write_report"]

SHOWN_ANSWERS = 12

CURVES = (
    ("critic/score/mean", "Mean training reward", "reward"),
    ("actor/entropy", "Entropy of the policy", "nats per token"),
    ("response_length/mean", "Length of the answers", "tokens"),
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
    template = files("caldera.tracking").joinpath("report_template.html").read_text("utf-8")
    page = Template(template).substitute(
        style=page_style(),
        title=escape(title),
        headline=_headline(metrics),
        curves=_curves(metrics),
        answers=_answers(answers),
        timings=_timings(phase_times(metrics)),
        config=_config(run_dir / "config.yaml"),
    )
    write_text_atomic(out, [page])


def page_style() -> str:
    """The style sheet of every page that Caldera writes."""
    return files("caldera.tracking").joinpath("page.css").read_text("utf-8")


def _note(sentence: str) -> str:
    return f'<p class="note">{escape(sentence)}</p>'


def _headline(metrics: RunMetrics) -> str:
    keys = validation_keys(metrics)
    cards = [_validation_card(source, key, metrics) for source, key in keys.items()]
    if not keys:
        cards.append(_card("Validation", "none", "no validation was logged"))
    if len(keys) > 1:  # several data sources take a row of their own
        cards.append('<div class="break"></div>')
    seconds = metrics.values("timing_s/step")
    tokens = metrics.values("perf/total_num_tokens")
    throughput = metrics.values("perf/throughput")
    last_step = max(metrics.rows, default=0)
    cards.append(
        _card("Training steps", f"{last_step:,}", f"{len(metrics.rows):,} rows of metrics")
    )
    if seconds:
        per_step = f"{_seconds(sum(seconds) / len(seconds))} a step"
        cards.append(_card("Training time", _duration(sum(seconds)), per_step))
    if seconds and tokens and sum(seconds) > 0:
        speed = f"{sum(tokens) / sum(seconds):,.0f}"
        cards.append(_card("Tokens per second", speed, "prompts and answers, all devices"))
    elif throughput:
        speed = f"{sum(throughput) / len(throughput):,.0f}"
        cards.append(_card("Tokens per second", speed, "on each device"))
    return "\n".join(cards)


def _validation_card(source: str, key: str, metrics: RunMetrics) -> str:
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
        return _card(f"Validation {label}", shown[0], f"{source}, step {first_step:.0f} only")
    steps = f"{source}, steps {first_step:.0f} to {last_step:.0f}"
    return _card(f"Validation {label}", " → ".join(shown), f"{gain} · {steps}", wide=True)


def _card(label: str, value: str, note: str, *, wide: bool = False) -> str:
    return (
        f'<div class="card{" wide" if wide else ""}"><p class="label">{escape(label)}</p>'
        f'<p class="value">{escape(value)}</p><p class="detail">{escape(note)}</p></div>'
    )


def _curves(metrics: RunMetrics) -> str:
    figures: list[str] = []
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
    if missing:
        figures.append(_note(f"Not logged by this run: {', '.join(missing)}."))
    return "\n".join(figures)


def _figure(
    series: list[Series], title: str, unit: str, y_range: tuple[float, float] | None = None
) -> str:
    chart = svg_curve(series, title, "step", unit, width=480, height=280, y_range=y_range)
    return f"<figure>{chart}</figure>"


def _answers(answers: ValidationAnswers | None) -> str:
    if answers is None:
        return _note(
            "This run kept no validation answers. Set trainer.validation_data_dir to keep them."
        )
    if answers.first_step == answers.last_step:
        return _note(
            f"Only the validation of step {answers.first_step} was kept; before and after need two."
        )
    if not answers.pairs:
        return _note(
            f"The validations of steps {answers.first_step} and {answers.last_step} "
            "have no prompt in common."
        )
    better = sum(pair.score_change > 0 for pair in answers.pairs)
    worse = sum(pair.score_change < 0 for pair in answers.pairs)
    same = len(answers.pairs) - better - worse
    shown = _most_changed(answers.pairs)
    summary = (
        f"Of {len(answers.pairs):,} answers, {better:,} scored higher at step {answers.last_step} "
        f"than at step {answers.first_step}, {worse:,} lower and {same:,} the same. "
        f"Shown: {len(shown):,} prompts, beginning with those whose score changed."
    )
    return "\n".join([_note(summary), *(_pair(pair, answers) for pair in shown)])


def _most_changed(pairs: Iterable[AnswerPair]) -> list[AnswerPair]:
    """One pair a prompt, those that changed before those that did not."""
    one_each: dict[str, AnswerPair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.rank):
        one_each.setdefault(pair.prompt, pair)
    return list(one_each.values())[:SHOWN_ANSWERS]


def _pair(pair: AnswerPair, answers: ValidationAnswers) -> str:
    truth = f'<p class="truth">Expected <code>{escape(pair.truth)}</code></p>' if pair.truth else ""
    return (
        f'<article class="sample"><pre class="prompt">{escape(pair.prompt.strip())}</pre>{truth}'
        f'<div class="pair">{_answer(f"Before, step {answers.first_step}", pair.before)}'
        f"{_answer(f'After, step {answers.last_step}', pair.after)}</div></article>"
    )


def _answer(heading: str, answer: Answer) -> str:
    sign = {True: "✓ ", False: "✗ ", None: ""}[answer.correct]
    kind = {True: "good", False: "bad", None: "unknown"}[answer.correct]
    score = "no score" if answer.score is None else f"{answer.score:.4g}"
    text = escape(answer.text.strip()) or "<em>empty answer</em>"
    return (
        f'<div class="answer {kind}"><p class="who">{escape(heading)}'
        f'<span class="mark">{sign}{score}</span></p><pre>{text}</pre></div>'
    )


def _timings(times: list[PhaseTime]) -> str:
    if not times:
        return _note("This run logged no timing_s/step, so its phases cannot be compared.")
    bars = "".join(
        f'<span class="phase {time.name}" style="width:{time.share:.3%}" '
        f'title="{escape(time.description)}: {time.share:.1%}"></span>'
        for time in times
    )
    rows = "".join(
        f'<tr><td><span class="swatch phase {time.name}"></span>{escape(time.description)} '
        f"<code>{escape(time.name)}</code></td><td>{time.count:,}</td>"
        f"<td>{_seconds(time.mean_seconds)}</td><td>{time.share:.1%}</td></tr>"
        for time in times
    )
    return (
        f'<div class="stack">{bars}</div><div class="scroll"><table><thead><tr><th>Phase</th>'
        "<th>Steps</th><th>Mean</th><th>Share</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _config(path: Path) -> str:
    if not path.is_file():
        return _note("This run left no config.yaml beside its metrics.")
    text = escape(path.read_text(encoding="utf-8"))
    return f"<details><summary>Resolved configuration</summary><pre>{text}</pre></details>"


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
