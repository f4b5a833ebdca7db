"""What is known of the answers in a file."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from caldera.commands.evaluation import Question, _outcome, tells_predictions
from caldera.config import compose_config
from caldera.config.fields import check_values
from caldera.config.offline import EvaluationConfig
from caldera.errors import ConfigError, DataError
from caldera.reward.samples import FAILED, Outcome

SAID = Outcome(1.0, {"pred": "7"})
SILENT = Outcome(1.0)
BROKEN = Outcome(state=FAILED, error="x")


def question(*outcomes: Outcome) -> Question:
    return Question(0, "my/own", "2+5=", "7", ["7"] * len(outcomes), list(outcomes))


def test_an_answer_that_failed_does_not_take_the_votes_of_the_others() -> None:
    asked = question(SAID, BROKEN, SAID)
    assert tells_predictions([asked], scores_by_source=False)
    scores = asked.prompt_scores(pass_score=1.0, predict=True)
    assert scores.predictions == ("7", None, "7")


def test_votes_need_what_every_scored_answer_said() -> None:
    assert not tells_predictions([question(SAID, SILENT)], scores_by_source=False)
    assert not tells_predictions([question(BROKEN, BROKEN)], scores_by_source=False)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"acc": 1}, "a dict without 'score'"),
        (float("nan"), "must be a finite number"),
        ({"score": 1, "reward_state": "value"}, "'reward_state' is a reserved name"),
    ],
)
def test_nonsense_of_a_scorer_is_an_outcome(returned: Any, told: str) -> None:
    outcome = _outcome(done(returned))
    assert (outcome.state, outcome.score) == (FAILED, 0)
    assert told in str(outcome.error)


def test_what_a_scorer_raised_is_an_outcome_and_a_mistake_of_the_run_is_not() -> None:
    future: Future[Any] = Future()
    future.set_exception(ZeroDivisionError("by hand"))
    assert "by hand" in str(_outcome(future).error)
    mistake: Future[Any] = Future()
    mistake.set_exception(DataError("no such column"))
    with pytest.raises(DataError, match="no such column"):
        _outcome(mistake)


def test_a_score_may_take_as_long_as_it_likes() -> None:
    def timeout(value: str) -> float | None:
        keys = ["data.path=x", f"evaluation.timeout={value}"]
        config = compose_config(keys, "evaluation", None, EvaluationConfig)
        check_values(config)
        return config.evaluation.timeout

    assert timeout("null") is None
    with pytest.raises(ConfigError, match=r"evaluation\.timeout=0.0: must be at least 0\.001"):
        timeout("0")


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
