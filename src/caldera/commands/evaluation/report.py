"""What an evaluation found: a table on the screen, a JSON file, and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.table import Table

from caldera.commands.evaluation.run import Question
from caldera.commands.evaluation.statistics import Comparison, Estimate
from caldera.reward.samples import VALUE
from caldera.tracking.dumps import write_text_atomic
from caldera.tracking.progress import CONSOLE
from caldera.tracking.report import page_style


@dataclass(frozen=True)
class SourceResult:
    """The answers to the prompts of one data source."""

    prompts: int
    answers: int
    failed: int
    """Answers whose scorer failed or took too long; they count as 0."""
    measures: dict[str, Estimate]
    comparison: Comparison | None = None


Results = Mapping[str, SourceResult]
"""By data source."""


def show(results: Results) -> None:
    """Print a table a data source."""
    for source, result in results.items():
        failed = f", {result.failed} could not be scored" if result.failed else ""
        title = f"{source}: {result.prompts} prompts, {result.answers} answers{failed}"
        CONSOLE.print(title, highlight=False, soft_wrap=True)
        table = Table("measure", "value", "95 % interval")
        for name, found in result.measures.items():
            table.add_row(name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}")
        if result.comparison is not None:
            table.add_section()
            table.add_row(*_comparison_cells(result.comparison))
        CONSOLE.print(table)
        if result.comparison is not None:
            words = _comparison_words(result.comparison)
            CONSOLE.print(words, highlight=False, soft_wrap=True)


def _comparison_cells(found: Comparison) -> tuple[str, str, str]:
    difference = found.difference
    interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
    return "first - second", f"{difference.value:+.4f}", interval


def _comparison_words(found: Comparison) -> str:
    same = found.prompts - found.better - found.worse
    return (
        f"p = {found.p_value:.4g} (paired permutation test): the first is better on {found.better} "
        f"prompts, worse on {found.worse}, the same on {same}"
    )


def write_json(results: Results, out: Path) -> None:
    """All numbers, for programs."""
    content: dict[str, Any] = {source: asdict(result) for source, result in results.items()}
    write_text_atomic(out, [json.dumps(content, indent=2), "\n"])


def write_page(
    results: Results,
    questions: Sequence[Question],
    pass_score: float,
    most: int,
    title: str,
    out: Path,
) -> None:
    """A page with the tables and the failing answers, that needs nothing but itself."""
    template = files("caldera.commands.evaluation").joinpath("page.html").read_text("utf-8")
    failing = [
        (question, index)
        for question in questions
        for index in range(len(question.answers))
        if not question.passes(index, pass_score)
    ]
    page = Template(template).substitute(
        style=page_style(),
        title=escape(title),
        tables="\n".join(_table(source, result) for source, result in results.items()),
        count=_count(len(failing), most),
        answers="\n".join(_answer(question, index) for question, index in failing[:most]),
    )
    write_text_atomic(out, [page])


def _count(failing: int, most: int) -> str:
    if not failing:
        return "Every answer passes."
    shown = "all of them" if failing <= most else f"the first {most:,} of them"
    return f"{failing:,} answers do not pass; {shown} are here."


def _table(source: str, result: SourceResult) -> str:
    rows = [
        (name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}")
        for name, found in result.measures.items()
    ]
    note = f"{result.prompts:,} prompts, {result.answers:,} answers"
    if result.failed:
        note += f"; {result.failed:,} could not be scored and count as 0"
    if result.comparison is not None:
        rows.append(_comparison_cells(result.comparison))
        note += f". {_comparison_words(result.comparison)}"
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<h2>{escape(source)}</h2><p class='note'>{escape(note)}.</p><div class='panel scroll'>"
        "<table><thead><tr><th>measure</th><th>value</th><th>95 % interval</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _answer(question: Question, index: int) -> str:
    outcome = question.outcomes[index]
    verdict = f"score {outcome.score:g}" if outcome.state == VALUE else outcome.state
    error = f"<p class='truth'>{escape(outcome.error)}</p>" if outcome.error else ""
    which = f"row {question.row}, answer {index} · {question.data_source}"
    return (
        f"<article class='sample'><pre class='prompt'>{escape(question.prompt)}</pre>"
        f"<p class='truth'>expected <code>{escape(str(question.ground_truth))}</code></p>"
        f"<div class='answer bad'><p class='who'><span>{escape(which)}</span>"
        f"<span class='mark'>{escape(verdict)}</span></p>{error}"
        f"<pre>{escape(question.answers[index])}</pre></div></article>"
    )
