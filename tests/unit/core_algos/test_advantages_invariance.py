"""What holds for every estimator: order, padding, blocks and gaps do not matter."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from caldera.config.algorithm import AlgorithmConfig
from caldera.core_algos import AdvantageEstimator, AdvantageInputs, estimate_advantages
from caldera.core_algos.advantages import tokens
from caldera.errors import ConfigError

ROOT = Path(__file__).parents[3]
CONFIG = AlgorithmConfig(gamma=0.9, lam=0.8, gdpo_reward_keys=["acc", "form"])
EVERY = pytest.mark.parametrize("name", AdvantageEstimator)
FEW = settings(deadline=None, max_examples=8)


@st.composite
def batches(draw: st.DrawFn) -> AdvantageInputs:
    """Two to three prompts with two to three answers each; the first answer is empty."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=2, max_size=3))
    return make_batch(sizes, draw(st.integers(2, 6)), draw(st.integers(0, 2**31)))


def make_batch(sizes: list[int], width: int, seed: int) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0] = False
    mask[1, :2] = True
    uids = [f"prompt {number}" for number, size in enumerate(sizes) for _ in range(size)]
    log_probs = -random(rows, width).abs()
    return AdvantageInputs(
        random(rows, width),
        mask.long(),
        index=np.array(uids, dtype=object),
        values=random(rows, width),
        reward_baselines=random(rows),
        sum_pi_squared=log_probs.exp().square(),
        old_log_probs=log_probs,
        rollout_is_weights=random(rows, width).exp(),
        non_tensor_batch={key: random(rows).numpy().astype(object) for key in ("acc", "form")},
    )


def each_tensor(inputs: AdvantageInputs, function: Any) -> AdvantageInputs:
    held = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    changed = {key: function(value) for key, value in held.items() if isinstance(value, Tensor)}
    return replace(inputs, **changed)


@EVERY
@FEW
@given(inputs=batches(), random=st.randoms())
def test_the_order_of_rows(name: str, inputs: AdvantageInputs, random: Any) -> None:
    order = list(range(len(inputs.response_mask)))
    random.shuffle(order)
    assert inputs.non_tensor_batch is not None
    assert isinstance(inputs.index, np.ndarray)
    columns = {key: column[order] for key, column in inputs.non_tensor_batch.items()}
    shuffled = each_tensor(inputs, lambda tensor: tensor[order])
    shuffled = replace(shuffled, index=inputs.index[order], non_tensor_batch=columns)
    expected = [output[order] for output in estimate_advantages(name, inputs, CONFIG)]
    torch.testing.assert_close(list(estimate_advantages(name, shuffled, CONFIG)), expected)


@EVERY
@FEW
@given(inputs=batches(), padding=st.integers(1, 40))
def test_more_padding(name: str, inputs: AdvantageInputs, padding: int) -> None:
    def pad(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        fill = float("nan") if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor, (0, padding), value=fill)

    expected = [pad(output).nan_to_num() for output in estimate_advantages(name, inputs, CONFIG)]
    actual = estimate_advantages(name, each_tensor(inputs, pad), CONFIG)
    torch.testing.assert_close(list(actual), expected)


@EVERY
@FEW
@given(inputs=batches())
def test_zero_outside_the_mask_and_finite_within(name: str, inputs: AdvantageInputs) -> None:
    outside = inputs.response_mask == 0
    for output in estimate_advantages(name, inputs, CONFIG):
        assert output.dtype == inputs.token_level_rewards.dtype
        assert output.isfinite().all()
        assert not output[outside].any()


@EVERY
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    inputs = make_batch([2, 3], 5, seed=1)
    expected = estimate_advantages(name, inputs, CONFIG)
    other = replace(inputs, response_mask=inputs.response_mask.to(dtype))
    torch.testing.assert_close(estimate_advantages(name, other, CONFIG), expected)


@EVERY
@pytest.mark.parametrize("elements", [1, 12])
def test_blocks_change_nothing(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_batch([2, 3, 2], 6, seed=2)
    expected = estimate_advantages(name, inputs, CONFIG)
    monkeypatch.setattr(tokens, "_BLOCK_ELEMENTS", elements)
    torch.testing.assert_close(estimate_advantages(name, inputs, CONFIG), expected)


@EVERY
def test_the_inputs_are_left_alone(name: str) -> None:
    inputs = make_batch([2, 2], 5, seed=3)
    before = each_tensor(inputs, torch.clone)
    estimate_advantages(name, inputs, CONFIG)
    for field in fields(inputs):
        if isinstance(getattr(inputs, field.name), Tensor):
            assert torch.equal(getattr(inputs, field.name), getattr(before, field.name))


@EVERY
def test_groups_of_one(name: str) -> None:
    inputs = make_batch([1, 1, 1], 5, seed=4)
    if name == AdvantageEstimator.GRPO_PASSK:
        with pytest.raises(ConfigError, match="grpo_passk"):
            estimate_advantages(name, inputs, CONFIG)
        return
    for output in estimate_advantages(name, inputs, CONFIG):
        assert output.isfinite().all()


@pytest.mark.parametrize("turns", ["1", "3"])
def test_every_estimator_agrees_with_the_loops_of_its_benchmark(
    turns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import advantages as benchmark  # type: ignore[import-not-found]

    benchmark.main(["--rows", "16", "--tokens", "40", "--group", "4", "--share", "1",
                    "--turns", turns])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["estimator", *AdvantageEstimator]
