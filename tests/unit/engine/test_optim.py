"""Optimisers by name, and schedules worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from caldera.config import OptimizerConfig
from caldera.engine.optim import build_optimizer, build_schedule
from caldera.errors import ConfigError


def rates(steps: int, **keys: Any) -> list[float]:
    config = OptimizerConfig(optimizer="SGD", lr=2.0, **keys)
    optimizer = build_optimizer([nn.Parameter(torch.ones(1))], config)
    schedule = build_schedule(optimizer, config)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_constant() -> None:
    assert rates(3) == [2, 2, 2]


def test_constant_with_warm_up() -> None:
    assert rates(6, lr_warmup_steps=4) == [0, 0.5, 1, 1.5, 2, 2]
    assert rates(4, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5, total_training_steps=4) == 4 * [2]


def test_warm_up_as_a_share_of_all_steps() -> None:
    assert rates(4, lr_warmup_steps_ratio=0.25, total_training_steps=8) == [0, 1, 2, 2]


def test_cosine() -> None:
    # Half a cycle over four steps: (1 + cos(pi k / 4)) of the peak rate 2, halved.
    expected = [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]
    assert rates(5, lr_scheduler_type="cosine", total_training_steps=4) == pytest.approx(expected)


def test_cosine_with_warm_up_and_floor() -> None:
    # After two steps of warm-up, from 2 to a tenth of it: at half way 2 * (1 + 0.1) / 2.
    found = rates(
        7, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1, total_training_steps=6
    )
    quarter = 2 * (0.5**0.5 * 0.45 + 0.55)
    assert found == pytest.approx([0, 1, 2, quarter, 1.1, 2.2 - quarter, 0.2])


def test_the_floor_holds_after_the_last_step() -> None:
    found = rates(9, lr_scheduler_type="cosine", min_lr_ratio=0.5, total_training_steps=2)
    assert min(found) == pytest.approx(1.0)


def test_full_cycles() -> None:
    # One whole cycle over four steps comes back to the peak.
    found = rates(5, lr_scheduler_type="cosine", num_cycles=1.0, total_training_steps=4)
    assert found == pytest.approx([2, 1, 0, 1, 2], abs=1e-12)


def test_the_older_key_wins() -> None:
    keys = {"lr_scheduler_type": "constant", "total_training_steps": 2}
    assert rates(2, warmup_style="cosine", **keys) == pytest.approx([2, 1])


def test_adamw_gets_what_the_config_says() -> None:
    config = OptimizerConfig(lr=0.5, betas=[0.8, 0.9], weight_decay=0.3)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    trained = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([frozen, trained], config)
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert group["params"] == [trained]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.3)


def test_another_class_gets_the_arguments_that_it_takes() -> None:
    extra = {"momentum": 0.9}
    config = OptimizerConfig(optimizer="SGD", lr=0.5, override_optimizer_config=extra)
    optimizer = build_optimizer([nn.Parameter(torch.ones(1))], config)
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.defaults["momentum"], optimizer.defaults["weight_decay"]) == (0.9, 0.01)
    rprop = OptimizerConfig(optimizer="Rprop", optimizer_impl="torch.optim.rprop")
    assert "weight_decay" not in build_optimizer([nn.Parameter(torch.ones(1))], rprop).defaults


def test_fused_kernels_where_they_are_right() -> None:
    def is_fused(name: str) -> bool:
        config = OptimizerConfig(optimizer=name)
        return bool(build_optimizer([nn.Parameter(torch.ones(1))], config).defaults.get("fused"))

    names = ("Adam", "AdamW", "SGD", "Adagrad", "Rprop")
    assert [name for name in names if is_fused(name)] == ["Adam", "AdamW"]


def test_sgd_in_bfloat16() -> None:
    parameter = nn.Parameter(torch.ones(67, dtype=torch.bfloat16))
    config = OptimizerConfig(optimizer="SGD", lr=0.5, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    build_optimizer([parameter], config).step()
    assert parameter.tolist() == [0.5] * 67


@pytest.mark.parametrize(
    ("name", "module"), [("AdamX", "torch.optim"), ("AdamW", "torch.optimisers")]
)
def test_a_class_that_is_not_there(name: str, module: str) -> None:
    config = OptimizerConfig(optimizer=name, optimizer_impl=module)
    message = rf"^optim\.optimizer='{name}' is not in optim\.optimizer_impl='{module}': "
    with pytest.raises(ConfigError, match=message):
        build_optimizer([nn.Parameter(torch.ones(1))], config)


def test_an_argument_that_the_class_does_not_take() -> None:
    config = OptimizerConfig(override_optimizer_config={"epsilon": 1e-8})
    with pytest.raises(ConfigError, match=r"AdamW does not take epsilon; takes .*\beps\b"):
        build_optimizer([nn.Parameter(torch.ones(1))], config)


def test_no_override() -> None:
    config = OptimizerConfig(override_optimizer_config=None)
    assert build_optimizer([nn.Parameter(torch.ones(1))], config).defaults["eps"] == 1e-8
