"""Weights, rejections and metrics of rollout correction, against values worked out by hand.

Log-ratios are multiples of L = ln 2. Row 0 has ratios 2, 1/2, 4; row 1 has 1/2, a masked token,
1/4; row 2 has no token. Whatever is masked is NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.config.rollout_correction import RS_STATISTICS
from caldera.core_algos import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
)
from caldera.core_algos.rollout_correction import rejection_statistic
from caldera.errors import ConfigError

NAN = math.nan
L = math.log(2)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
LOG_RATIOS = torch.tensor([[L, -L, 2 * L], [-L, NAN, -2 * L], [NAN, NAN, NAN]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -3.0], [-3.0, NAN, -1.0], [NAN, NAN, NAN]])
OLD = ROLLOUT + LOG_RATIOS
PREFIX = "rollout_corr/"


def correct(**settings: Any) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        OLD, ROLLOUT, MASK, **settings
    )
    for metric in metrics.values():
        assert metric.shape == () and not metric.requires_grad
    return weights, mask, {name: metric.item() for name, metric in metrics.items()}


def rows(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    values: list[float] = tensor.flatten().tolist()
    return values


def family(metrics: dict[str, float], start: str) -> dict[str, float]:
    prefix = PREFIX + start
    return {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 10.0, [2, 0.5, 4, 0.5, 0, 0.25, 0, 0, 0]),
        ("token", 2.0, [2, 0.5, 2, 0.5, 0, 0.25, 0, 0, 0]),
        ("token", "2.0", [2, 0.5, 2, 0.5, 0, 0.25, 0, 0, 0]),
        ("token", "0.3_3.0", [2, 0.5, 0, 0.5, 0, 0, 0, 0, 0]),
        ("sequence", 10.0, [4, 4, 4, 0.125, 0, 0.125, 0, 0, 0]),
        ("sequence", 3, [3, 3, 3, 0.125, 0, 0.125, 0, 0, 0]),
        ("sequence", "0.2_5.0", [4, 4, 4, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_weights(level: str, threshold: object, expected: list[float]) -> None:
    weights, mask, _ = correct(rollout_is=level, rollout_is_threshold=threshold)
    assert rows(weights) == pytest.approx(expected)
    assert mask is MASK


def test_weights_are_cut_to_2_unless_told_otherwise() -> None:
    assert rows(correct(rollout_is="token")[0])[:3] == pytest.approx([2, 0.5, 2])


def test_normalised_token_weights_have_mean_1_over_tokens() -> None:
    weights, *_ = correct(rollout_is="token", rollout_is_batch_normalize=True)
    mean = 5.25 / 5
    expected = [2 / mean, 0.5 / mean, 2 / mean, 0.5 / mean, 0, 0.25 / mean, 0, 0, 0]
    assert rows(weights) == pytest.approx(expected)


def test_normalised_sequence_weights_have_mean_1_over_sequences() -> None:
    weights, *_ = correct(
        rollout_is="sequence", rollout_is_threshold=8, rollout_is_batch_normalize=True
    )
    mean = (4 + 0.125) / 2
    expected = [4 / mean] * 3 + [0.125 / mean, 0, 0.125 / mean, 0, 0, 0]
    assert rows(weights) == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_are_all_0_stay_so(level: str) -> None:
    weights, _, metrics = correct(
        rollout_is=level, rollout_is_threshold="90.0_99.0", rollout_is_batch_normalize=True
    )
    assert rows(weights) == [0.0] * 9
    assert metrics[f"{PREFIX}rollout_is_eff_sample_size"] == 0
    assert metrics[f"{PREFIX}rollout_is_oob_ratio"] == 1


def test_no_gradient_flows() -> None:
    old = torch.zeros(1, 2, requires_grad=True)
    weights, _, metrics = compute_rollout_correction_and_rejection_mask(
        old, torch.ones(1, 2), torch.ones(1, 2), rollout_is="token"
    )
    assert weights is not None and not weights.requires_grad
    assert not any(metric.requires_grad for metric in metrics.values())


def test_metrics_of_token_weights() -> None:
    *_, metrics = correct(rollout_is="token", rollout_is_threshold=2.0)
    per_sequence = [6.5 / 3, 0.375]
    assert family(metrics, "rollout_is_") == pytest.approx(
        {
            "mean": 7.25 / 5,
            "max": 4,
            "min": 0.25,
            "std": math.sqrt(20.5625 / 5 - 1.45**2),
            "ratio_fraction_high": 1 / 5,
            "ratio_fraction_low": 1 / 5,
            "seq_mean": sum(per_sequence) / 2,
            "seq_max": 6.5 / 3,
            "seq_min": 0.375,
            "seq_std": (per_sequence[0] - per_sequence[1]) / 2,
            "seq_max_deviation": 6.5 / 3 - 1,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 1 / 2,
            "oob_ratio": 1 / 5,
            "eff_sample_size": 5.25**2 / (5 * 8.5625),
        }
    )


def test_metrics_of_sequence_weights_between_two_bounds() -> None:
    *_, metrics = correct(rollout_is="sequence", rollout_is_threshold="0.2_5.0")
    assert family(metrics, "rollout_is_") == pytest.approx(
        {
            "mean": 12.25 / 5,
            "max": 4,
            "min": 0.125,
            "std": math.sqrt((3 * 16 + 2 / 64) / 5 - 2.45**2),
            "ratio_fraction_high": 0,
            "ratio_fraction_low": 2 / 5,
            "seq_mean": 4.125 / 2,
            "seq_max": 4,
            "seq_min": 0.125,
            "seq_std": 3.875 / 2,
            "seq_max_deviation": 3,
            "seq_fraction_high": 0,
            "seq_fraction_low": 1 / 2,
            "oob_ratio": 2 / 5,
            "eff_sample_size": 12**2 / (5 * 48),
        }
    )


# ---------------------------------------------------------------------- rejection

K2 = L**2 / 2
STATISTICS: dict[str, list[float]] = {
    "token_k1": [-L, L, -2 * L, L, 0, 2 * L],
    "token_k2": [K2, K2, 4 * K2, K2, 0, 4 * K2],
    "token_k3": [1 - L, L - 0.5, 3 - 2 * L, L - 0.5, 0, 2 * L - 0.75],
    "seq_sum_k1": [-2 * L] * 3 + [3 * L, 0, 3 * L],
    "seq_sum_k2": [6 * K2] * 3 + [5 * K2, 0, 5 * K2],
    "seq_sum_k3": [3.5 - 2 * L] * 3 + [3 * L - 1.25, 0, 3 * L - 1.25],
    "seq_mean_k1": [-2 * L / 3] * 3 + [1.5 * L, 0, 1.5 * L],
    "seq_mean_k2": [2 * K2] * 3 + [2.5 * K2, 0, 2.5 * K2],
    "seq_mean_k3": [(3.5 - 2 * L) / 3] * 3 + [1.5 * L - 0.625, 0, 1.5 * L - 0.625],
    "seq_max_k2": [4 * K2] * 3 + [4 * K2, 0, 4 * K2],
    "seq_max_k3": [3 - 2 * L] * 3 + [2 * L - 0.75, 0, 2 * L - 0.75],
}


def test_all_eleven_statistics_are_tested() -> None:
    assert tuple(STATISTICS) == RS_STATISTICS
    assert len(STATISTICS) == 11


@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics(statistic: str) -> None:
    log_ratios = torch.nan_to_num(LOG_RATIOS, nan=0.0)
    values = rejection_statistic(log_ratios, MASK, statistic)
    assert rows(values) == pytest.approx(STATISTICS[statistic] + [0, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("statistic", "threshold", "expected"),
    [
        ("token_k1", "0.4_3.0", [1, 1, 0, 1, 0, 0]),
        ("token_k1", "0.2_1.5", [0, 1, 0, 1, 0, 1]),
        ("token_k1", 3.0, [1, 1, 0, 1, 0, 0]),
        ("token_k2", 2 * K2, [1, 1, 0, 1, 0, 0]),
        ("token_k3", 0.7, [1, 1, 0, 1, 0, 1]),
        ("seq_sum_k1", "0.1_3.0", [0, 0, 0, 1, 0, 1]),
        ("seq_sum_k1", "0.2_5.0", [1, 1, 1, 0, 0, 0]),
        ("seq_sum_k2", 5.5 * K2, [0, 0, 0, 1, 0, 1]),
        ("seq_sum_k3", 1.0, [0, 0, 0, 1, 0, 1]),
        ("seq_mean_k1", 2.0, [1, 1, 1, 0, 0, 0]),
        ("seq_mean_k2", 2.2 * K2, [1, 1, 1, 0, 0, 0]),
        ("seq_mean_k3", 0.5, [0, 0, 0, 1, 0, 1]),
        ("seq_max_k2", 3 * K2, [0, 0, 0, 0, 0, 0]),
        ("seq_max_k3", 1.0, [0, 0, 0, 1, 0, 1]),
    ],
)
def test_rejection(statistic: str, threshold: object, expected: list[int]) -> None:
    weights, mask, metrics = correct(rollout_rs=statistic, rollout_rs_threshold=threshold)
    assert weights is None
    assert mask.dtype == MASK.dtype
    assert rows(mask) == [*expected, 0, 0, 0]
    lost = [expected.count(0) - 1, int(sum(expected[:3]) < 3) + int(sum(expected[3:]) < 2)]
    for name in (f"rollout_rs_{statistic}_", "rollout_rs_"):
        assert metrics[f"{PREFIX}{name}masked_fraction"] == pytest.approx(lost[0] / 5)
        assert metrics[f"{PREFIX}{name}seq_masked_fraction"] == pytest.approx(lost[1] / 2)


def test_all_statistics_must_pass() -> None:
    _, mask, metrics = correct(
        rollout_rs="token_k1,seq_max_k3", rollout_rs_threshold=["0.2_1.5", 2.0]
    )
    assert rows(mask) == [0, 1, 0, 1, 0, 1, 0, 0, 0]
    _, mask, metrics = correct(rollout_rs="token_k1,seq_max_k3", rollout_rs_threshold="0.2_1.5,1.0")
    assert rows(mask) == [0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert metrics[f"{PREFIX}rollout_rs_token_k1_masked_fraction"] == pytest.approx(2 / 5)
    assert metrics[f"{PREFIX}rollout_rs_seq_max_k3_masked_fraction"] == pytest.approx(3 / 5)
    assert metrics[f"{PREFIX}rollout_rs_masked_fraction"] == pytest.approx(3 / 5)
    assert metrics[f"{PREFIX}rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)


def test_metrics_of_a_token_statistic() -> None:
    *_, metrics = correct(rollout_rs="token_k1", rollout_rs_threshold="0.4_3.0")
    assert family(metrics, "rollout_rs_token_k1_") == pytest.approx(
        {
            "mean": L / 5,
            "max": 2 * L,
            "min": -2 * L,
            "std": L * math.sqrt(11 / 5 - 1 / 25),
            "fraction_high": 1 / 5,
            "fraction_low": 1 / 5,
            "seq_mean": L * (-2 / 3 + 3 / 2) / 2,
            "seq_max": 1.5 * L,
            "seq_min": -2 * L / 3,
            "seq_std": L * (2 / 3 + 3 / 2) / 2,
            "seq_max_deviation": 1.5 * L,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 0,
            "masked_fraction": 2 / 5,
            "seq_masked_fraction": 1,
        }
    )


def test_metrics_of_a_sequence_statistic() -> None:
    *_, metrics = correct(rollout_rs="seq_max_k3", rollout_rs_threshold=1.0)
    high, low = 3 - 2 * L, 2 * L - 0.75
    mean = (3 * high + 2 * low) / 5
    assert family(metrics, "rollout_rs_seq_max_k3_") == pytest.approx(
        {
            "mean": mean,
            "max": high,
            "min": low,
            "std": math.sqrt((3 * high**2 + 2 * low**2) / 5 - mean**2),
            "fraction_high": 3 / 5,
            "fraction_low": 0,
            "seq_mean": (high + low) / 2,
            "seq_max": high,
            "seq_min": low,
            "seq_std": (high - low) / 2,
            "seq_max_deviation": high,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 0,
            "masked_fraction": 3 / 5,
            "seq_masked_fraction": 1 / 2,
        }
    )


def test_weights_and_rejection_together_share_the_mask_they_came_with() -> None:
    weights, mask, _ = correct(
        rollout_is="token", rollout_rs="seq_max_k3", rollout_rs_threshold=1.0
    )
    assert rows(weights) == pytest.approx([2, 0.5, 2, 0.5, 0, 0.25, 0, 0, 0])
    assert rows(mask) == [0, 0, 0, 1, 0, 1, 0, 0, 0]


# ---------------------------------------------------------------------- diagnostics


def test_mismatch_metrics() -> None:
    rollout = [2.0, 2.0]  # log-perplexities of the rows
    training = [2 - 2 * L / 3, 2 + 1.5 * L]
    expected = {
        "kl": L / 5,
        "k3_kl": ((3.5 - 2 * L) + (3 * L - 1.25)) / 5,
        "training_ppl": sum(map(math.exp, training)) / 2,
        "training_log_ppl": sum(training) / 2,
        "rollout_ppl": math.exp(2),
        "rollout_log_ppl": sum(rollout) / 2,
        "log_ppl_diff": L * (-2 / 3 + 3 / 2) / 2,
        "log_ppl_abs_diff": L * (2 / 3 + 3 / 2) / 2,
        "log_ppl_diff_max": 1.5 * L,
        "log_ppl_diff_min": -2 * L / 3,
        "ppl_ratio": (2 ** (-2 / 3) + 2**1.5) / 2,
        "chi2_token": 20.5625 / 5 - 1,
        "chi2_seq": (16 + 1 / 64) / 2 - 1,
    }
    metrics = compute_offpolicy_metrics(OLD, ROLLOUT, MASK)
    values = {name.removeprefix(PREFIX): metric.item() for name, metric in metrics.items()}
    assert values == pytest.approx(expected, rel=1e-5)


def test_mismatch_metrics_are_always_there_and_the_others_only_when_asked_for() -> None:
    weights, mask, metrics = correct()
    assert weights is None and mask is MASK
    assert set(metrics) == set(compute_offpolicy_metrics(OLD, ROLLOUT, MASK))
    *_, metrics = correct(rollout_is="token")
    assert family(metrics, "rollout_rs") == {}
    *_, metrics = correct(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert family(metrics, "rollout_is") == {}


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "tokens"}, r"rollout_correction\.rollout_is='tokens'"),
        ({"rollout_is": "token", "rollout_is_threshold": "3.0_2.0"}, r"rollout_is_threshold="),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, r"'token_k4' is not one of"),
        ({"rollout_rs": "token_k1"}, r"rollout_rs_threshold=null"),
    ],
)
def test_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        correct(**settings)
