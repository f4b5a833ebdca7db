"""What the roles do alike: build an engine, and write its checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

from caldera.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimizerConfig
from caldera.data import hf_tokenizer
from caldera.engine import ENGINES, Engine
from caldera.models.forward import base_module
from caldera.models.loading import enable_checkpointing
from caldera.models.seeds import derive_seed


def build_engine(
    strategy: str,
    module: nn.Module,
    device: torch.device,
    memory: FSDPConfig,
    optim: OptimizerConfig | None = None,
    grad_clip: float = 0.0,
    gradient_checkpointing: bool = False,
) -> Engine:
    """The engine of a strategy. Every rank holds the whole model: fsdp and fsdp2 are `local`."""
    name = "local" if strategy in ("fsdp", "fsdp2") else strategy
    if gradient_checkpointing:
        enable_checkpointing(module)
    engine = ENGINES[name](module, device, memory, optim, grad_clip)
    if engine.dp_size > 1:  # a process of its own, whose generators nobody has seeded
        _seed_everything(derive_seed(memory.seed, "rank", engine.dp_rank))
    return engine


def _seed_everything(seed: int) -> None:
    """What draws from a global generator, such as dropout, draws the same in every run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_role(
    engine: Engine, folder: Path, checkpoint: CheckpointConfig, model: ModelConfig
) -> None:
    """Engine state, and a `huggingface` folder with config and tokenizer.

    To be called by every rank; when it returns, all have written their part.
    """
    if engine.dp_rank == 0:
        _save_descriptions(engine.module, folder, model)
    engine.save(folder, checkpoint.save_contents)


def _save_descriptions(module: nn.Module, folder: Path, model: ModelConfig) -> None:
    target = folder / "huggingface"
    hugging_face = base_module(module)
    hugging_face.config.save_pretrained(target)
    if hugging_face.can_generate():
        hugging_face.generation_config.save_pretrained(target)
    tokenizer = hf_tokenizer(
        model.tokenizer_path or model.path or "",
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )
    tokenizer.save_pretrained(target)
    if hugging_face is not module:
        module.save_pretrained(folder / "lora_adapter")  # type: ignore[operator]
