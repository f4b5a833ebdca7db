"""Score a file of responses, compare it with another one, and report what was found."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import mean
from string import Template
from typing import Any

import numpy as np
from rich.table import Table

from caldera.commands.statistics import (
    Comparison,
    Estimate,
    PromptScores,
    compare,
    estimate,
    measures,
)
from caldera.config.offline import EvaluationConfig, EvaluationDataConfig
from caldera.data.files import Row, read_rows
from caldera.errors import ConfigError, DataError
from caldera.reward.answer_formats import PRED, AnswerFormats, has_answer
from caldera.reward.samples import VALUE, Outcome, failure, outcome_of, read_score
from caldera.reward.scoring import Scoring, attempt
from caldera.reward_score.predictions import find_extractor, find_reader
from caldera.storage.writing import write_text_atomic
from caldera.tracking import TrainingProgress
from caldera.tracking.progress import CONSOLE
from caldera.tracking.report import page_style
from caldera.trainer.bundle import write_bundle


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
        title = f"{source}: {result.prompts} prompts, {result.answers} responses{failed}"
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
    template = files("caldera.commands").joinpath("evaluation.html").read_text("utf-8")
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
        return "Every response passes."
    shown = "all of them" if failing <= most else f"the first {most:,} of them"
    return f"{failing:,} responses do not pass; {shown} are here."


def _table(source: str, result: SourceResult) -> str:
    rows = [
        (name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}")
        for name, found in result.measures.items()
    ]
    note = f"{result.prompts:,} prompts, {result.answers:,} responses"
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
    which = f"row {question.row}, response {index} · {question.data_source}"
    return (
        f"<article class='sample'><pre class='prompt'>{escape(question.prompt)}</pre>"
        f"<p class='truth'>expected <code>{escape(str(question.ground_truth))}</code></p>"
        f"<div class='answer bad'><p class='who'><span>{escape(which)}</span>"
        f"<span class='mark'>{escape(verdict)}</span></p>{error}"
        f"<pre>{escape(question.answers[index])}</pre></div></article>"
    )


logger = logging.getLogger(__name__)


# ---- Answers in a file, and what their scorers say of them


@dataclass
class Question:
    """A row of the file: a prompt, its answers, and once they are scored their outcomes."""

    row: int
    data_source: str
    prompt: str
    ground_truth: Any
    answers: list[str]
    outcomes: list[Outcome] = field(default_factory=list)

    def prompt_scores(self, pass_score: float, predict: bool) -> PromptScores:
        """The numbers of its answers; what each answered if `predict`."""
        worth = [_worth(outcome) for outcome in self.outcomes]
        return PromptScores(
            scores=np.array([outcome.score for outcome in self.outcomes]),
            passed=np.array([value >= pass_score for value in worth]),
            predictions=tuple(self._predictions()) if predict else None,
        )

    def _predictions(self) -> Iterator[str | None]:
        for answer, outcome in zip(self.answers, self.outcomes, strict=True):
            if "pred" in outcome.extras:
                yield str(outcome.extras["pred"])
            elif outcome.state == VALUE and (extract := find_extractor(self.data_source)):
                yield extract(answer)
            else:
                yield None

    def passes(self, index: int, pass_score: float) -> bool:
        return _worth(self.outcomes[index]) >= pass_score


def tells_predictions(questions: Sequence[Question], scores_by_source: bool) -> bool:
    """Whether it is known what each answer says, so that votes can be counted."""
    scored = [outcome for q in questions for outcome in q.outcomes if outcome.state == VALUE]
    if scored and all("pred" in outcome.extras for outcome in scored):
        return True
    return scores_by_source and all(find_extractor(q.data_source) is not None for q in questions)


def _worth(outcome: Outcome) -> float:
    """What decides whether an answer passes."""
    accuracy = outcome.extras.get("acc", outcome.score)
    return float(accuracy) if isinstance(accuracy, int | float) else outcome.score


def read_questions(path: str, config: EvaluationDataConfig, key: str) -> list[Question]:
    """The rows of a file, whose responses are one text or a list of texts."""
    required = {
        config.response_key: "data.response_key",
        config.data_source_key: "data.data_source_key",
        config.reward_model_key: "data.reward_model_key",
    }
    table = read_rows(path, key=key, required=required)
    questions = [_question(i, row, config, table.where(i)) for i, row in enumerate(table.rows)]
    return questions


def _question(number: int, row: Row, config: EvaluationDataConfig, where: str) -> Question:
    given = row[config.response_key]
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list | np.ndarray) or not len(answers):
        raise DataError(
            f"{where}: the column {config.response_key!r} (data.response_key) must hold a list of "
            f"responses, got {given!r}"
        )
    truth = row[config.reward_model_key]
    if not isinstance(truth, Mapping) or "ground_truth" not in truth:
        raise DataError(
            f"{where}: the column {config.reward_model_key!r} (data.reward_model_key) must hold a "
            f"dict with 'ground_truth', got {truth!r}"
        )
    return Question(
        row=number,
        data_source=str(row[config.data_source_key]),
        prompt=_text_of(row.get(config.prompt_key)),
        ground_truth=truth["ground_truth"],
        answers=[str(answer) for answer in answers],
    )


def _text_of(prompt: Any) -> str:
    """A prompt for a person to read: its text, or its messages one after another."""
    if isinstance(prompt, list | np.ndarray):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return "" if prompt is None else str(prompt)


def score_all(questions: Sequence[Question], scoring: Scoring, title: str) -> None:
    """Give every question the outcomes of its answers."""
    places: dict[Future[Any], tuple[Question, int]] = {}
    for question in questions:
        question.outcomes = [Outcome()] * len(question.answers)
        for index, answer in enumerate(question.answers):
            arguments = {
                "data_source": question.data_source,
                "solution_str": answer,
                "ground_truth": question.ground_truth,
            }
            future = scoring.submit(arguments, f"row {question.row}, response {index}")
            places[future] = question, index
    with TrainingProgress(len(places), description=title, unit="response") as progress:
        for done, future in enumerate(as_completed(places), start=1):
            question, index = places[future]
            question.outcomes[index] = _outcome(future)
            progress.update(done)


def _outcome(future: Future[Any]) -> Outcome:
    error = future.exception()
    if error is not None:
        return failure(error)
    judged = attempt(lambda: outcome_of(*read_score(future.result())))
    problem = judged.exception()
    outcome: Outcome = judged.result() if problem is None else failure(problem)
    return outcome


def evaluate(config: EvaluationConfig, scoring: Scoring) -> Results:
    """Score, show and write what is found; returns it."""
    data, options = config.data, config.evaluation
    if not data.path:
        raise ConfigError("data.path is missing: the parquet file with the responses")
    questions = read_questions(data.path, data, "data.path")
    score_all(questions, scoring, "Scoring")
    _warn_of_formats(questions, config)
    others = None
    if data.compare_path is not None:
        others = read_questions(data.compare_path, data, "data.compare_path")
        _check_same_prompts(questions, others, data.path, data.compare_path)
        score_all(others, scoring, "Scoring the second file")
    results = {
        source: _result(rows, others, config) for source, rows in _by_source(questions).items()
    }
    show(results)
    folder = Path(options.output_dir or Path(data.path).expanduser().parent).expanduser()
    name = Path(data.path).stem
    page = folder / f"{name}.evaluation.html"
    write_json(results, folder / f"{name}.evaluation.json")
    write_page(results, questions, options.pass_score, options.shown_answers, name, page)
    write_bundle(folder / f"{name}.evaluation.bundle", config, "evaluation.output_dir")
    logger.info("written: %s and .json beside it", page)
    return results


def _warn_of_formats(questions: Sequence[Question], config: EvaluationConfig) -> None:
    formats = AnswerFormats({} if config.custom_reward_function.path is None else None)
    sources = [question.data_source for question in questions for _ in question.answers]
    responses = [answer for question in questions for answer in question.answers]
    formats.warn(formats.counts(sources, responses))


def print_scores(results: Results) -> None:
    """The mean score of each data source, as one line that programs of verl's users read."""
    scores = {
        f"test_score/{source}": next(iter(result.measures.values())).value
        for source, result in results.items()
    }
    sys.stdout.write(f"{scores}\n")


def _by_source(questions: Sequence[Question]) -> dict[str, list[Question]]:
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.data_source, []).append(question)
    return found


def _result(
    questions: Sequence[Question], others: Sequence[Question] | None, config: EvaluationConfig
) -> SourceResult:
    predict = tells_predictions(questions, config.custom_reward_function.path is None)
    prompts = [q.prompt_scores(config.evaluation.pass_score, predict) for q in questions]
    outcomes = [outcome for question in questions for outcome in question.outcomes]
    return SourceResult(
        prompts=len(questions),
        answers=len(outcomes),
        failed=sum(outcome.state != VALUE for outcome in outcomes),
        measures=measures(prompts) | _parsed(questions, config),
        comparison=None
        if others is None
        else compare(
            [_mean_score(question) for question in questions],
            [_mean_score(others[question.row]) for question in questions],
        ),
    )


def _parsed(questions: Sequence[Question], config: EvaluationConfig) -> dict[str, Estimate]:
    """The share of the responses in which the scorer finds an answer, where it tells."""
    by_source = config.custom_reward_function.path is None
    reader = find_reader(questions[0].data_source, {}) if by_source else None
    outcomes = [outcome for question in questions for outcome in question.outcomes]
    if reader is not None:
        shares = [
            mean(float(reader.extract(answer) is not None) for answer in question.answers)
            for question in questions
        ]
    elif any(PRED in outcome.extras for outcome in outcomes):
        shares = [
            mean(float(has_answer(outcome.extras.get(PRED))) for outcome in question.outcomes)
            for question in questions
        ]
    else:
        return {}
    return {"parsed": estimate(shares)}


def _mean_score(question: Question) -> float:
    return sum(outcome.score for outcome in question.outcomes) / len(question.outcomes)


def _check_same_prompts(
    questions: Sequence[Question], others: Sequence[Question], first: str, second: str
) -> None:
    if len(questions) != len(others):
        raise DataError(
            f"data.compare_path={second!r} has {len(others)} rows, data.path={first!r} has "
            f"{len(questions)}: both must answer the same prompts"
        )
    for one, other in zip(questions, others, strict=True):
        if (one.prompt, one.data_source) != (other.prompt, other.data_source):
            raise DataError(
                f"data.compare_path={second!r}: its row {one.row} has another prompt or data "
                f"source than that of data.path={first!r}: both must answer the same prompts in "
                "one order"
            )
