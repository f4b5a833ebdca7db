"""What is known of the answers in a file."""

from __future__ import annotations

from caldera.reward.samples import FAILED, Outcome
from caldera.trainer.evaluation.answers import Question, tells_predictions

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
