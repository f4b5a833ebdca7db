"""Learning rates of strategy=megatron, by Megatron's keys."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from caldera.config import OptimizerConfig

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
