"""Optimisers by class path, and learning-rate schedules."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from caldera.config import OptimizerConfig
from caldera.errors import ConfigError

FUSED = ("Adam", "AdamW")
"""Optimisers whose fused kernels are right for every device, precision and sharding; SGD's are not
for bfloat16 on a CPU."""


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """The optimiser class that the config names, with the arguments that it takes."""
    try:
        cls = getattr(importlib.import_module(config.optimizer_impl), config.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"optim.optimizer={config.optimizer!r} is not in "
            f"optim.optimizer_impl={config.optimizer_impl!r}: {error}"
        ) from error
    takes = inspect.signature(cls).parameters
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    arguments = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "weight_decay": config.weight_decay,
    }
    if config.optimizer in FUSED:
        arguments["fused"] = True
    arguments = {name: value for name, value in arguments.items() if name in takes}
    extra = config.override_optimizer_config or {}
    unknown = sorted(set(extra) - set(takes))
    if unknown:
        raise ConfigError(
            f"optim.override_optimizer_config: {config.optimizer} does not take "
            f"{', '.join(unknown)}; takes {', '.join(takes)}"
        )
    return cast(Optimizer, cls(trained, **{**arguments, **extra}))


def step_if_finite(optimizer: Optimizer, norm: Tensor) -> None:
    """Take an optimiser step, unless the gradient norm is infinite or no number.

    Fused optimisers decide so on the device; with others, the host must wait and look.
    """
    is_bad = ~torch.isfinite(norm)
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(is_bad):
        optimizer.step()


def build_schedule(optimizer: Optimizer, config: OptimizerConfig) -> LambdaLR:
    """Warm-up, then constant or cosine; it advances once a training step."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    kind = config.warmup_style or config.lr_scheduler_type
    if kind == "cosine":
        return LambdaLR(optimizer, _cosine(warmup, total, config.min_lr_ratio, config.num_cycles))
    return LambdaLR(optimizer, lambda step: step / max(1, warmup) if step < warmup else 1.0)


def _cosine(warmup: int, total: int, floor: float, cycles: float) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total - warmup)
        wave = math.cos(2 * math.pi * cycles * progress)
        return max(floor, wave * (1 - floor) / 2 + (1 + floor) / 2)

    return factor


# ---- Learning rates of strategy=megatron, by Megatron's keys

FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "exponential": lambda share: 2 * 0.5**share - 1,
    "minus_sqrt": lambda share: 1 - math.sqrt(share),
}
"""From 1 to 0, by the share of the steps that have passed."""


def build_decay(optimizer: Optimizer, config: OptimizerConfig) -> LambdaLR:
    """Warm-up, then a fall to min_lr or none; it advances once a training step."""
    peak = config.lr
    return LambdaLR(optimizer, lambda step: learning_rate(config, step) / peak if peak else 0.0)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of a training step, counted from 0."""
    peak, floor, start = config.lr, config.min_lr, config.lr_warmup_init
    end = config.lr_decay_steps or max(config.total_training_steps, 1)
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * max(config.total_training_steps, 0))
    if step <= warmup and warmup > 0:
        return start + (peak - start) * step / warmup
    if config.lr_decay_style == "constant":
        return peak
    if step > end:
        return floor
    if config.lr_decay_style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
    shape, begin = config.lr_decay_style, warmup
    if shape == "WSD":
        assert config.lr_wsd_decay_steps is not None, "the config's check asks for it"
        shape, begin = config.lr_wsd_decay_style, end - config.lr_wsd_decay_steps
    share = max(0.0, (step - begin) / (end - begin))
    return floor + (peak - floor) * FALLS[shape](share)
