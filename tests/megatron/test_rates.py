"""The schedule is Megatron's, step by step."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from caldera.config import OptimizerConfig
from caldera.config.optim import LR_DECAY_STYLES, LR_WSD_DECAY_STYLES
from caldera.engine.optim import learning_rate

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("style", "wsd", "warmup"), list(product(LR_DECAY_STYLES, LR_WSD_DECAY_STYLES, (0, 3)))
)
def test_every_shape(style: str, wsd: str, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = OptimizerConfig(
        lr=2e-3, min_lr=1e-4, lr_warmup_init=1e-5, lr_warmup_steps=warmup, lr_decay_style=style,
        lr_wsd_decay_style=wsd, lr_wsd_decay_steps=4, lr_decay_steps=10, total_training_steps=14,
    )  # fmt: skip
    group: dict[str, Any] = {}
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=1e-5, max_lr=2e-3, min_lr=1e-4,
        lr_warmup_steps=warmup, lr_decay_steps=10, lr_decay_style=style, start_wd=0.1, end_wd=0.1,
        wd_incr_steps=10, wd_incr_style="constant", wsd_decay_steps=4, lr_wsd_decay_style=wsd,
    )  # fmt: skip
    for step in range(14):
        assert learning_rate(config, step) == pytest.approx(group["lr"], rel=1e-12), step
        theirs.step(1)
