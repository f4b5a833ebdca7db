"""Learning rates by Megatron's keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caldera.config import OptimizerConfig
from caldera.engine.optim import build_decay


def rates(steps: int, **keys: Any) -> list[float]:
    """The learning rates of the first training steps."""
    config = OptimizerConfig(lr=1.0, total_training_steps=8, **keys)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = build_decay(optimizer, config)
    found = []
    for _ in range(steps):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"lr_warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0]),
        ({"lr_warmup_steps_ratio": 0.25, "lr_warmup_init": 0.2}, [0.2, 0.6, 1.0, 1.0]),
        ({"lr_decay_style": "linear"}, [1.0, 0.875, 0.75, 0.625]),
        ({"lr_decay_style": "linear", "lr_decay_steps": 2}, [1.0, 0.5, 0.0, 0.0]),
        (
            {"lr_decay_style": "linear", "lr_decay_steps": 2, "min_lr": 0.1},
            [1.0, 0.55, 0.1, 0.1],
        ),
        ({"lr_decay_style": "cosine", "lr_decay_steps": 2}, [1.0, 0.5, 0.0, 0.0]),
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 1},
            [0.0, 1.0, 0.5**0.5, 3**-0.5],
        ),
        (
            {
                "lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_decay_steps": 3,
                "lr_wsd_decay_steps": 2,
            },
            [1.0, 1.0, 0.5, 0.0],
        ),
    ],
)  # fmt: skip
def test_the_first_rates(keys: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **keys) == pytest.approx(expected)


def test_a_rate_of_zero_stays() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    schedule = build_decay(optimizer, OptimizerConfig(lr=0.0, total_training_steps=2))
    assert schedule.get_last_lr() == [0.0]
