"""Metrics of a training step, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from caldera.protocol import DataProto
from caldera.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_rollout_diff_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
)


def make_batch(num_turns: list[int] | None = None) -> DataProto:
    """P = 3 and R = 4: one sample cut off at R, with a tool token, one short, one aborted."""
    attention_mask = torch.tensor(
        [
            [0, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 0, 0],
            [0, 0, 1, 0, 0, 0, 0],
        ]
    )
    response_mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    tensors = {
        "prompts": torch.ones(3, 3, dtype=torch.int64),
        "responses": torch.ones(3, 4, dtype=torch.int64),
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        # The last row's and the masked positions' numbers must not be seen.
        "token_level_scores": torch.tensor([[0.0, 0, 0, 1], [0, 3, 0, 0], [99, 0, 0, 0]]),
        "token_level_rewards": torch.tensor([[0.5, 0, 0, 1], [0, 2, 0, 0], [99, 0, 0, 0]]),
        "advantages": torch.tensor([[1.0, 99, 2, 3], [-4, 8, 99, 99], [99, 99, 99, 99]]),
        "returns": torch.tensor([[1.0, 99, 2, 3], [4, 5, 99, 99], [99, 99, 99, 99]]),
        "values": torch.tensor([[1.0, 99, 2, 3], [4, 0, 99, 99], [99, 99, 99, 99]]),
    }
    columns = {} if num_turns is None else {"__num_turns__": np.array(num_turns, dtype=np.int32)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_data_metrics() -> None:
    metrics = compute_data_metrics(make_batch(num_turns=[2, 4, 6]), use_critic=True)
    # returns 1..5 vary by 2.5; what the values leave unexplained, 0 0 0 0 5, by 5.
    explained = 1 - 5 / (2.5 + 1e-5)
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 2.0,
            "critic/score/max": 3.0,
            "critic/score/min": 1.0,
            "critic/rewards/mean": 1.75,
            "critic/rewards/max": 2.0,
            "critic/rewards/min": 1.5,
            "critic/advantages/mean": 2.0,
            "critic/advantages/max": 8.0,
            "critic/advantages/min": -4.0,
            "critic/returns/mean": 3.0,
            "critic/returns/max": 5.0,
            "critic/returns/min": 1.0,
            "critic/values/mean": 2.0,
            "critic/values/max": 4.0,
            "critic/values/min": 0.0,
            "critic/vf_explained_var": explained,
            "response_length/mean": 2.0,
            "response_length/max": 4.0,
            "response_length/min": 0.0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 3.0,
            "response_length_non_aborted/max": 4.0,
            "response_length_non_aborted/min": 2.0,
            "response_length_non_aborted/clip_ratio": 0.5,
            "response/aborted_ratio": 1 / 3,
            "prompt_length/mean": 2.0,
            "prompt_length/max": 3.0,
            "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 1 / 3,
            "num_turns/mean": 4.0,
            "num_turns/max": 6.0,
            "num_turns/min": 2.0,
        }
    )
    assert all(type(value) is float for value in metrics.values())


def test_without_a_critic_its_metrics_are_absent() -> None:
    with_critic = compute_data_metrics(make_batch(), use_critic=True)
    without = compute_data_metrics(make_batch(), use_critic=False)
    assert set(with_critic) - set(without) == {
        "critic/values/mean",
        "critic/values/max",
        "critic/values/min",
        "critic/vf_explained_var",
    }
    assert not any(name.startswith("num_turns/") for name in without)


@pytest.mark.parametrize("rows", [[2], [2, 2]])
def test_a_batch_of_aborted_samples_has_finite_metrics(rows: list[int]) -> None:
    metrics = compute_data_metrics(make_batch()[rows], use_critic=True)
    assert metrics["response/aborted_ratio"] == 1.0
    assert metrics["critic/score/mean"] == 0.0
    assert metrics["critic/advantages/max"] == 0.0
    assert metrics["response_length_non_aborted/mean"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_one_token_has_finite_metrics() -> None:
    batch = make_batch()[[1]]
    assert batch.batch is not None
    batch.batch["response_mask"] = torch.tensor([[1, 0, 0, 0]])
    metrics = compute_data_metrics(batch, use_critic=True)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["critic/advantages/mean"] == -4.0


def test_timing_metrics() -> None:
    timing = {"gen": 3.0, "ref": 6.0, "update_actor": 12.0, "reward": 1.0, "step": 24.0}
    # 6 response tokens, 12 tokens in all
    assert compute_timing_metrics(make_batch(), timing) == pytest.approx(
        {
            "timing_s/gen": 3.0,
            "timing_s/ref": 6.0,
            "timing_s/update_actor": 12.0,
            "timing_s/reward": 1.0,
            "timing_s/step": 24.0,
            "timing_per_token_ms/gen": 500.0,
            "timing_per_token_ms/ref": 500.0,
            "timing_per_token_ms/update_actor": 1000.0,
        }
    )


def test_no_time_per_token_without_tokens() -> None:
    metrics = compute_timing_metrics(make_batch()[[2]], {"gen": 3.0, "adv": 1.0})
    assert metrics == {"timing_s/gen": 3.0, "timing_s/adv": 1.0, "timing_per_token_ms/adv": 1000.0}


def test_throughput_metrics() -> None:
    assert compute_throughput_metrics(make_batch(), {"step": 3.0}, n_gpus=2) == pytest.approx(
        {"perf/total_num_tokens": 12, "perf/time_per_step": 3.0, "perf/throughput": 2.0}
    )


def rollout_diff(rollout: list[float], actor: list[float], mask: list[int]) -> dict[str, float]:
    metrics = compute_rollout_diff_metrics(
        torch.tensor([rollout]).log(), torch.tensor([actor]).log(), torch.tensor([mask])
    )
    assert all(math.isfinite(value) for value in metrics.values())
    names = {"valid", "max", "mean", "std"}
    assert set(metrics) == {f"training/rollout_probs_diff_{name}" for name in names} | {
        "training/rollout_actor_probs_pearson_corr"
    }
    return {name.removeprefix("training/rollout_"): value for name, value in metrics.items()}


def test_rollout_diff_metrics() -> None:
    rollout, actor = [0.1, 0.2, 0.6, 0.9], [0.2, 0.2, 0.4, 0.1]
    metrics = rollout_diff(rollout, actor, [1, 1, 1, 0])
    correlation = np.corrcoef(rollout[:3], actor[:3])[0, 1]
    assert metrics == pytest.approx(
        {
            "probs_diff_valid": 1.0,
            "probs_diff_max": 0.2,
            "probs_diff_mean": 0.1,
            "probs_diff_std": 0.1,
            "actor_probs_pearson_corr": correlation,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("rollout", "actor", "mask", "correlation"),
    [
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], [1, 1, 1], 1.0),  # all equal
        ([0.1, 0.1, 0.1], [0.3, 0.3, 0.3], [1, 1, 1], 0.0),  # constant, but different
        ([0.1, 0.1, 0.1], [0.1, 0.2, 0.3], [1, 1, 1], 0.0),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [1, 1, 1], 1.0),
        ([0.3, 0.2], [0.3, 0.9], [1, 0], 1.0),  # one token
        ([0.3, 0.2], [0.4, 0.9], [1, 0], 0.0),
        ([1.0, 0.2], [1.0, 0.9], [0, 0], 0.0),  # none
    ],
)
def test_rollout_diff_metrics_are_never_nan(
    rollout: list[float], actor: list[float], mask: list[int], correlation: float
) -> None:
    metrics = rollout_diff(rollout, actor, mask)
    assert metrics["actor_probs_pearson_corr"] == pytest.approx(correlation)
    assert metrics["probs_diff_valid"] == float(any(mask))
