"""Score a file of answers, and compare it with another one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from caldera.config.offline import EvaluationConfig
from caldera.errors import ConfigError, DataError
from caldera.reward.answer_formats import AnswerFormats
from caldera.reward.samples import VALUE
from caldera.reward.scoring import Scoring
from caldera.trainer.bundle import write_bundle
from caldera.trainer.evaluation.answers import (
    Question,
    read_questions,
    score_all,
    tells_predictions,
)
from caldera.trainer.evaluation.report import Results, SourceResult, show, write_json, write_page
from caldera.trainer.evaluation.statistics import compare, measures

logger = logging.getLogger(__name__)


def evaluate(config: EvaluationConfig, scoring: Scoring) -> Results:
    """Score, show and write what is found; returns it."""
    data, options = config.data, config.evaluation
    if not data.path:
        raise ConfigError("data.path is missing: the parquet file with the answers")
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
        measures=measures(prompts),
        comparison=None
        if others is None
        else compare(
            [_mean_score(question) for question in questions],
            [_mean_score(others[question.row]) for question in questions],
        ),
    )


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
