from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from caldera.config import FSDPConfig, OptimizerConfig
from caldera.engine import EngineOptions, LocalEngine
from caldera.protocol import DataProto

PROMPTS, RESPONSES = 5, 6  # widths P and R
# (prompt tokens, response mask): one full, some short, one with tool tokens, one without answer.
ROWS = [
    (5, [1, 1, 1, 1, 1, 1]),
    (2, [1, 1, 0, 0, 1, 1]),
    (1, [1]),
    (4, []),
    (3, [1, 1, 1]),
    (2, [1, 1, 1, 1]),
]


@pytest.fixture
def batch() -> DataProto:
    """Six rows with random tokens and advantages; what is masked holds nonsense."""
    generator = torch.Generator().manual_seed(3)
    width = PROMPTS + RESPONSES
    attention = torch.zeros(len(ROWS), width, dtype=torch.long)
    response_mask = torch.zeros(len(ROWS), RESPONSES, dtype=torch.long)
    for row, (prompt, mask) in enumerate(ROWS):
        attention[row, PROMPTS - prompt : PROMPTS + len(mask)] = 1
        response_mask[row, : len(mask)] = torch.tensor(mask)
    input_ids = torch.randint(1, 48, (len(ROWS), width), generator=generator)
    advantages = torch.randn(len(ROWS), RESPONSES, generator=generator, dtype=torch.float64)
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "responses": input_ids[:, PROMPTS:],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": advantages.masked_fill(response_mask == 0, 1e6),
        }
    )


@pytest.fixture
def make_engine(tiny_model: Callable[..., PreTrainedModel]) -> Callable[..., LocalEngine]:
    """An engine around a tiny model; plain gradient descent unless told otherwise."""

    def make(
        module: Any = "llama",
        memory: FSDPConfig | None = None,
        optim: OptimizerConfig | None = None,
        grad_clip: float = 0.0,
    ) -> LocalEngine:
        if isinstance(module, str):
            module = tiny_model(module)
        optim = optim or OptimizerConfig(optimizer="SGD", lr=1.0, weight_decay=0.0)
        return LocalEngine(
            module, torch.device("cpu"), EngineOptions(memory or FSDPConfig(), optim, grad_clip)
        )

    return make
