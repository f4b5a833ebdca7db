"""Validation metrics against hand-made numbers and a plain, slow computation."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from caldera.trainer.ppo.validation import (
    name_validation_metrics,
    process_validation_metrics,
)


def one_prompt(**infos: list[Any]) -> dict[str, dict[str, float]]:
    count = len(next(iter(infos.values())))
    return process_validation_metrics(["s"] * count, ["u"] * count, infos)["s"]


def test_one_sample_gives_only_a_mean() -> None:
    metrics = process_validation_metrics(
        ["s", "s"], ["u1", "u2"], {"reward": [1.0, 0.0], "acc": [True, True], "pred": ["1", "2"]}
    )
    assert metrics == {"s": {"reward": {"mean@1": 0.5}, "acc": {"mean@1": 1.0}}}


def test_mean_and_std_are_averaged_over_prompts() -> None:
    metrics = process_validation_metrics(
        ["s"] * 4, ["u1", "u2", "u1", "u2"], {"reward": [0.0, 5.0, 1.0, 7.0]}
    )
    assert metrics["s"]["reward"]["mean@2"] == pytest.approx((0.5 + 6.0) / 2)
    assert metrics["s"]["reward"]["std@2"] == pytest.approx((0.5 + 1.0) / 2)


@pytest.mark.parametrize(
    ("count", "sizes"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_which_metrics_there_are(count: int, sizes: list[int]) -> None:
    without_votes = {f"mean@{count}", f"std@{count}"} | {
        f"{kind}@{size}/{statistic}"
        for kind, size, statistic in itertools.product(["best", "worst"], sizes, ["mean", "std"])
    }
    votes = {f"maj@{size}/{statistic}" for size in sizes for statistic in ["mean", "std"]}
    rewards = [float(i) for i in range(count)]
    assert set(one_prompt(reward=rewards)["reward"]) == without_votes
    with_pred = one_prompt(reward=rewards, pred=["x"] * count)
    assert set(with_pred["reward"]) == without_votes | votes
    assert "pred" not in with_pred


def test_best_and_worst_are_close_to_what_can_be_computed() -> None:
    metrics = one_prompt(acc=[1.0, 0.0, 0.0, 0.0])["acc"]
    # Two draws with replacement both miss the one right answer with probability 9/16.
    assert metrics["best@2/mean"] == pytest.approx(7 / 16, abs=0.05)
    assert metrics["best@2/std"] == pytest.approx((7 / 16 * 9 / 16) ** 0.5, abs=0.02)
    assert metrics["worst@2/mean"] == pytest.approx(1 / 16, abs=0.03)
    assert metrics["best@4/mean"] == pytest.approx(1 - (3 / 4) ** 4, abs=0.05)


def test_equal_samples_leave_nothing_to_chance() -> None:
    metrics = one_prompt(reward=[0.25] * 4, pred=["7"] * 4)["reward"]
    for name, value in metrics.items():
        assert value == (0.0 if "std" in name else 0.25), name


def slow_metrics(values: list[float], preds: list[str], seed: int) -> dict[str, float]:
    """One draw at a time, with Python's own max, min and Counter."""
    metrics: dict[str, float] = {}
    for size in [2, 4, 5]:
        random = np.random.RandomState(seed)
        outcomes: dict[str, list[float]] = {"best": [], "worst": [], "maj": []}
        for _ in range(1000):
            draw = random.choice(len(values), size=size, replace=True)
            drawn = [values[i] for i in draw]
            outcomes["best"].append(max(drawn))
            outcomes["worst"].append(min(drawn))
            majority = Counter(preds[i] for i in draw).most_common(1)[0][0]
            outcomes["maj"].append(next(values[i] for i in draw if preds[i] == majority))
        for kind, results in outcomes.items():
            metrics[f"{kind}@{size}/mean"] = float(np.mean(results))
            metrics[f"{kind}@{size}/std"] = float(np.std(results))
    return metrics


@pytest.mark.parametrize("seed", [42, 7])
def test_the_bootstrap_equals_one_that_draws_step_by_step(seed: int) -> None:
    prompts, count = 70, 5  # more prompts than the majority vote takes at once
    random = np.random.RandomState(0)
    values = random.rand(prompts, count)
    preds = random.choice(["a", "b", "c"], size=(prompts, count))
    alone = [
        process_validation_metrics(
            ["s"] * count, ["u"] * count, {"reward": list(row), "pred": list(pred)}, seed=seed
        )["s"]["reward"]
        for row, pred in zip(values, preds, strict=True)
    ]
    for prompt in [0, 1, 69]:
        expected = slow_metrics(values[prompt].tolist(), preds[prompt].tolist(), seed)
        found = {name: alone[prompt][name] for name in expected}
        assert found == pytest.approx(expected)

    together = process_validation_metrics(
        ["s"] * prompts * count,
        [f"u{prompt}" for prompt in range(prompts) for _ in range(count)],
        {"reward": list(values.flat), "pred": list(preds.flat)},
        seed=seed,
    )["s"]["reward"]
    assert together == pytest.approx(
        {name: float(np.mean([metrics[name] for metrics in alone])) for name in together}
    )


def test_the_seed_decides() -> None:
    infos = {"reward": [0.0, 1.0, 2.0, 3.0]}
    first = process_validation_metrics(["s"] * 4, ["u"] * 4, infos)
    assert process_validation_metrics(["s"] * 4, ["u"] * 4, infos, seed=42) == first
    assert process_validation_metrics(["s"] * 4, ["u"] * 4, infos, seed=43) != first


def test_the_majority_may_be_wrong() -> None:
    metrics = one_prompt(acc=[1.0, 0.0, 0.0, 0.0, 0.0], pred=["7", "8", "8", "8", "8"])["acc"]
    # Of five draws, three or more must be the one sample with the right answer.
    chance = sum(
        n * 0.2**k * 0.8 ** (5 - k) for k, n in [(3, 10), (4, 5), (5, 1)]
    )  # 0.0579, binomial
    assert metrics["maj@5/mean"] == pytest.approx(chance, abs=0.025)
    assert metrics["mean@5"] == pytest.approx(0.2)


def test_no_prediction_is_a_vote_too() -> None:
    metrics = one_prompt(acc=[1.0, 0.0, 0.0, 0.0], pred=["7", None, None, None])["acc"]
    assert 0.0 < metrics["maj@4/mean"] < 0.5


def test_data_sources_and_uids_keep_apart() -> None:
    metrics = process_validation_metrics(
        ["a", "b", "a", "b"],
        ["u", "u", "u", "v"],
        {"reward": [1.0, 2.0, 3.0, 4.0], "acc": [1, None, 0, None], "pred": ["x", None, "x", None]},
    )
    assert metrics["a"]["reward"]["mean@2"] == 2.0
    assert metrics["a"]["acc"]["mean@2"] == 0.5
    assert metrics["a"]["reward"]["maj@2/std"] > 0
    # In b every prompt has one sample, and no sample has acc.
    assert metrics["b"] == {"reward": {"mean@1": 3.0}}


def test_a_variable_that_samples_lack_has_a_mean_only() -> None:
    metrics = process_validation_metrics(
        ["s"] * 4,
        ["u1", "u1", "u2", "u2"],
        {"reward": [0.0, 1.0, 0.0, 1.0], "error": [None, 3.0, None, float("nan")]},
    )["s"]
    assert metrics["error"] == {"mean@2": 3.0}
    assert "best@2/mean" in metrics["reward"]


def test_prompts_with_different_numbers_of_samples() -> None:
    metrics = process_validation_metrics(
        ["s"] * 5, ["u1", "u2", "u2", "u3", "u3"], {"reward": [9.0, 0.0, 1.0, 2.0, 3.0]}
    )["s"]["reward"]
    assert metrics["mean@1"] == 9.0
    assert metrics["mean@2"] == 1.5


def test_what_is_not_a_number_is_no_variable() -> None:
    metrics = one_prompt(reward=[np.float32(0.5)], note=["text"], spans=[[1, 2]], ok=[np.True_])
    assert metrics == {"reward": {"mean@1": 0.5}, "ok": {"mean@1": 1.0}}


def test_lists_must_be_as_long_as_the_samples() -> None:
    with pytest.raises(ValueError, match="shorter"):
        process_validation_metrics(["s", "s"], ["u"], {"reward": [1.0, 2.0]})


def test_names_of_the_core_and_of_the_rest() -> None:
    metrics = one_prompt(reward=[0.0, 1.0, 1.0, 1.0], acc=[0, 1, 1, 1], pred=list("abbb"))
    named = name_validation_metrics({"openai/gsm8k": metrics})
    core = {name for name in named if name.startswith("val-core/")}
    assert core == {
        f"val-core/openai/gsm8k/acc/{metric}"
        for metric in ["mean@4", "maj@4/mean", "maj@4/std", "best@4/mean", "best@4/std"]
    }
    assert named["val-core/openai/gsm8k/acc/mean@4"] == 0.75
    assert len(named) == sum(len(values) for values in metrics.values())
    for name in ["acc/std@4", "acc/worst@4/mean", "acc/best@2/mean", "reward/mean@4"]:
        assert f"val-aux/openai/gsm8k/{name}" in named


def test_without_acc_the_reward_is_the_core() -> None:
    named = name_validation_metrics({"s": one_prompt(reward=[0.5], score=[0.5])})
    assert named == {"val-core/s/reward/mean@1": 0.5, "val-aux/s/score/mean@1": 0.5}
