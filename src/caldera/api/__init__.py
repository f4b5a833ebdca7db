"""Runs as Python objects: the same code as the commands, with data and rewards in memory."""

from __future__ import annotations

from caldera.api.datasets import Dataset
from caldera.api.inference import evaluate, generate
from caldera.api.rewards import Reward
from caldera.api.runs import Run
from caldera.api.training import Callback, dpo, grpo, ppo, sft
from caldera.trainer.loop import StopTraining

__all__ = [
    "Callback",
    "Dataset",
    "Reward",
    "Run",
    "StopTraining",
    "dpo",
    "evaluate",
    "generate",
    "grpo",
    "ppo",
    "sft",
]
