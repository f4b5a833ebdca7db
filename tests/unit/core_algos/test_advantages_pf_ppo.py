from __future__ import annotations

import pytest
import torch

from caldera.core_algos import compute_pf_ppo_indices, compute_pf_ppo_weights
from caldera.errors import ConfigError, DataError

SCORES = torch.tensor([-3.0, 0.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("method", "power", "expected"),
    [
        ("pow", 2.0, [9.0, 1e-8, 1.0, 4.0, 4.0]),
        ("pow", 1.0, [3.0, 1e-8, 1.0, 2.0, 2.0]),
        ("max_min", 2.0, [1.0, 1e-8, 1e-8, 1.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.1, 0.4, 0.4]),
    ],
)
def test_weights(method: str, power: float, expected: list[float]) -> None:
    assert compute_pf_ppo_weights(SCORES, method, power).tolist() == pytest.approx(expected)


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    scores = torch.tensor([1.0, 2.0, 0.0, -1.0]).repeat(5000)
    rows = compute_pf_ppo_indices(scores, torch.Generator().manual_seed(0), weight_pow=2.0)
    assert rows.shape == (20000,)
    assert rows.unique().numel() < 20000  # with replacement
    shares = torch.bincount(rows % 4, minlength=4) / 20000
    assert shares.tolist() == pytest.approx([1 / 6, 4 / 6, 0, 1 / 6], abs=0.02)


def test_the_generator_decides() -> None:
    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return compute_pf_ppo_indices(SCORES.repeat(10), generator, "max_random").tolist()

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_scores_of_zero_are_drawn_alike() -> None:
    rows = compute_pf_ppo_indices(torch.zeros(1000), torch.Generator().manual_seed(0))
    assert rows.unique().numel() > 500


def test_unknown_methods_and_bad_scores() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.pf_ppo\.reweight_method='best': choose pow"):
        compute_pf_ppo_weights(SCORES, "best")
    with pytest.raises(DataError, match="finite scores"):
        compute_pf_ppo_weights(torch.tensor([1.0, float("nan")]))
