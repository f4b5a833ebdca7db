"""What the metrics of a run's steps say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from caldera.trainer.ppo.warning_signs import (
    WarningSigns,
    collapsed_policy,
    constant_reward,
    diverged_policy,
)


def rewarded(low: float, high: float, **more: float) -> dict[str, float]:
    scores = {"critic/score/mean": (low + high) / 2, "critic/score/min": low}
    return scores | {"critic/score/max": high} | more


def learning(entropy: float, gradient: float, score: float) -> dict[str, float]:
    return rewarded(0.0, 2 * score) | {
        "actor/entropy": entropy, "actor/grad_norm": gradient, "actor/lr": 0.01,
    }  # fmt: skip


def told(steps: Sequence[dict[str, float]]) -> list[list[str]]:
    signs = WarningSigns()
    return [signs.read(step) for step in steps]


def test_rewards_that_are_all_the_same_are_told_of_once_and_after_some_steps() -> None:
    said = told([rewarded(0, 0, **{"response_length/clip_ratio": 0.75})] * 12)
    assert [len(sentences) for sentences in said] == [0] * 4 + [1] + [0] * 7
    (sentence,) = said[4]
    assert sentence.startswith("every response of the last 5 steps got the same reward, 0, so")
    for hint in ("scorer", "response_length/clip_ratio=0.75", "rollout.n)", "rollout.temperature"):
        assert hint in sentence


def test_a_run_of_few_steps_is_told_at_its_end() -> None:
    signs = WarningSigns()
    assert signs.read(rewarded(0, 0)) == []
    (sentence,) = signs.read(rewarded(0, 0), is_end=True)
    assert sentence.startswith("every response of the last 2 steps got the same reward, 0, so")
    assert WarningSigns().read(rewarded(0, 1), is_end=True) == []


def test_one_other_reward_in_between_is_enough_to_learn_from() -> None:
    steps = [rewarded(0, 0)] * 4 + [rewarded(0, 1)]
    assert told(steps * 3) == [[]] * 15
    changing = [rewarded(score, score) for score in (0, 1, 0, 1, 0, 1)]  # from batch to batch
    assert told(changing) == [[]] * 6


def test_a_solved_task_is_not_taken_for_a_broken_scorer() -> None:
    solved = [rewarded(0, 1)] + [rewarded(1, 1)] * 5
    said = constant_reward(solved)
    assert said is not None
    assert "the prompts are solved" in said
    assert "scorer" not in said
    worse = [rewarded(0, 1)] + [rewarded(0, 0)] * 5
    assert "scorer" in str(constant_reward(worse))


def test_a_policy_that_a_learning_rate_destroys_is_told_of_with_its_numbers() -> None:
    steps = [learning(0.7, 2.0, 0.3), learning(0.5, 8.0, 0.4)] + [learning(0.01, 0.0, 0.1)] * 3
    assert collapsed_policy(steps[:-1]) is None
    said = collapsed_policy(steps)
    assert said is not None
    for part in (
        "actor/entropy fell from 0.7 (step 1) to 0.01", "actor/grad_norm from 8 to 0",
        "the reward is 0.1 (best 0.4)", "actor_rollout_ref.actor.optim.lr (now 0.01",
    ):  # fmt: skip
        assert part in said


def test_a_policy_of_no_numbers_is_told_of_once_with_its_learning_rate() -> None:
    steps = [learning(0.7, 2.0, 0.3), learning(2.7, math.nan, 0.0)]
    assert diverged_policy(steps) is None
    steps += [learning(math.nan, math.nan, 0.0)] * 4
    assert collapsed_policy(steps) is None
    said = [text for texts in told(steps) for text in texts if "every response" not in text]
    assert said == [diverged_policy(steps[:4])]
    for part in (
        "actor/grad_norm has not been a finite number for the last 3 steps",
        "such updates are skipped", "actor_rollout_ref.actor.optim.lr (now 0.01",
    ):  # fmt: skip
        assert part in said[0]
    assert diverged_policy([learning(0.7, math.inf, 0.3), *steps[:1]]) is None


def test_a_policy_that_is_sure_because_it_is_right_is_left_alone() -> None:
    steps = [learning(0.7, 2.0, 0.1), learning(0.5, 3.0, 0.4)] + [learning(0.01, 0.0, 0.5)] * 9
    assert collapsed_policy(steps) is None


def test_steps_without_these_metrics_say_nothing() -> None:
    assert told([{"training/global_step": 1.0}] * 9) == [[]] * 9
