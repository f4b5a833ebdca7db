"""What holds for rollout correction whatever the batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from caldera.config.rollout_correction import (
    ROLLOUT_CORRECTION_PRESETS,
    RS_STATISTICS,
    rollout_correction_preset,
)
from caldera.core_algos import compute_rollout_correction_and_rejection_mask

PREFIX = "rollout_corr/"
EVERYTHING = {
    "rollout_is": "token",
    "rollout_is_threshold": "0.3_3.0",
    "rollout_rs": ",".join(RS_STATISTICS),
    "rollout_rs_threshold": 2.0,
}
Result = tuple[Tensor | None, Tensor, dict[str, Tensor]]


def keys_of(preset: str) -> dict[str, Any]:
    config = dataclasses.asdict(rollout_correction_preset(preset))
    return {
        key: config[key]
        for key in (
            "rollout_is",
            "rollout_is_threshold",
            "rollout_rs",
            "rollout_rs_threshold",
            "rollout_is_batch_normalize",
        )
    }


SETTINGS = [
    *(pytest.param(keys_of(name), id=name) for name in ROLLOUT_CORRECTION_PRESETS),
    pytest.param(EVERYTHING, id="everything"),
    pytest.param({**EVERYTHING, "rollout_is": "sequence"}, id="everything_sequence"),
    pytest.param({**EVERYTHING, "rollout_is_batch_normalize": True}, id="normalised"),
]
few = settings(deadline=None, max_examples=10)


def run(batch: dict[str, Tensor], keys: dict[str, Any]) -> Result:
    return compute_rollout_correction_and_rejection_mask(
        batch["old"], batch["rollout"], batch["mask"], **keys
    )


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    density = draw(st.sampled_from([0.0, 0.4, 1.0]))
    distance = draw(st.sampled_from([0.0, 1e-3, 1.0, 1e4]))
    rollout = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < density
    return {"old": rollout + distance * noise, "rollout": rollout, "mask": mask.long()}


def assert_finite(result: Result) -> None:
    weights, mask, metrics = result
    assert weights is None or torch.isfinite(weights).all()
    assert set(mask.unique().tolist()) <= {0, 1}
    assert [name for name, metric in metrics.items() if not torch.isfinite(metric)] == []


@pytest.mark.parametrize("keys", SETTINGS)
@few
@given(batch=batches())
def test_equal_policies_need_no_correction(keys: dict[str, Any], batch: dict[str, Tensor]) -> None:
    mask = batch["mask"]
    weights, kept, metrics = run(batch | {"old": batch["rollout"]}, keys)
    assert torch.equal(kept, mask)
    if weights is not None:
        torch.testing.assert_close(weights, mask.double())
    present = 1.0 if mask.any() else 0.0
    ones = ("ppl_ratio", "is_mean", "is_max", "is_min", "is_eff_sample_size", "is_seq_mean",
            "is_seq_max", "is_seq_min")  # fmt: skip
    for name, metric in metrics.items():
        if name.endswith("_ppl"):
            continue
        expected = present if name.endswith(ones) else 0.0
        assert metric.item() == pytest.approx(expected, abs=1e-12), name


@pytest.mark.parametrize("keys", SETTINGS)
@few
@given(batch=batches(), data=st.data())
def test_order_and_padding_change_nothing(
    keys: dict[str, Any], batch: dict[str, Tensor], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch["mask"]))))
    left, right, empty = (data.draw(st.integers(0, 2)) for _ in range(3))

    def moved(values: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(values[order], (left, right, 0, empty), value=fill)

    weights, mask, metrics = run(batch, keys)
    garbage = {"old": math.nan, "rollout": -math.inf, "mask": 0}
    other = run({key: moved(batch[key], fill) for key, fill in garbage.items()}, keys)
    assert_finite(other)
    other_weights, other_mask, other_metrics = other
    assert torch.equal(other_mask, moved(mask, 0))
    if weights is not None:
        assert other_weights is not None
        torch.testing.assert_close(other_weights, moved(weights, 0))
    for name, metric in metrics.items():
        # A deviation is what is left of the numbers: it is as precise as they are.
        size = metrics.get(name.removesuffix("_std") + "_mean", metric).abs().item()
        atol = 1e-9 * max(1.0, size)
        torch.testing.assert_close(other_metrics[name], metric, rtol=1e-6, atol=atol, msg=name)


@pytest.mark.parametrize("keys", SETTINGS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_batches_without_a_token(keys: dict[str, Any], shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    _, mask, metrics = run({"old": empty, "rollout": empty, "mask": empty.long()}, keys)
    assert mask.shape == shape
    assert {name for name, metric in metrics.items() if metric.item() != 0} == set()


@pytest.mark.parametrize("extreme", [1e30, -1e30, math.inf, -math.inf])
@pytest.mark.parametrize("keys", SETTINGS)
def test_extreme_ratios_stay_finite(keys: dict[str, Any], extreme: float) -> None:
    rollout = torch.full((2, 3), -1.0)
    old = rollout + torch.tensor([[extreme, 0.0, -0.1], [0.0, 0.1, 0.0]])
    mask = torch.ones(2, 3, dtype=torch.long)
    weights, kept, metrics = run({"old": old, "rollout": rollout, "mask": mask}, keys)
    assert weights is None or torch.isfinite(weights).all()
    assert set(kept.unique().tolist()) <= {0, 1}
    for name, metric in metrics.items():
        # Log-perplexities are what they are; nothing that weighs or rejects is made of them.
        assert torch.isfinite(metric) or "log_ppl" in name, name


def test_a_batch_that_is_wholly_rejected() -> None:
    rollout = torch.full((2, 3), -1.0)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    result = run(
        {"old": rollout + 5, "rollout": rollout, "mask": mask},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0", "rollout_rs": "seq_mean_k1",
         "rollout_rs_threshold": "0.999_1.001", "rollout_is_batch_normalize": True},
    )  # fmt: skip
    assert_finite(result)
    weights, kept, metrics = result
    assert weights is not None and not weights.any() and not kept.any()
    assert metrics[f"{PREFIX}rollout_rs_masked_fraction"] == 1
    assert metrics[f"{PREFIX}rollout_rs_seq_masked_fraction"] == 1


def test_tokens_whose_log_probs_are_nan_are_rejected() -> None:
    rollout = torch.tensor([[-1.0, math.nan]])
    mask = torch.ones(1, 2)
    batch = {"old": torch.full((1, 2), -1.0), "rollout": rollout, "mask": mask}
    _, kept, _ = run(batch, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0})
    assert kept.tolist() == [[1, 0]]
    _, kept, _ = run(batch, {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 2.0})
    assert kept.tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_keeps_its_type(dtype: torch.dtype) -> None:
    rollout = torch.full((1, 2), -1.0)
    old = rollout + torch.tensor([[0.0, 3.0]])
    _, kept, _ = run(
        {"old": old, "rollout": rollout, "mask": torch.ones(1, 2, dtype=dtype)},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0},
    )
    assert kept.dtype == dtype
    assert kept.tolist() == [[1, 0]]
