"""What both trained roles do alike: build an engine, and write and read its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from caldera.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimizerConfig
from caldera.data import hf_tokenizer
from caldera.engine import ENGINES, Engine
from caldera.models.forward import base_module
from caldera.models.loading import enable_checkpointing


def build_engine(
    strategy: str,
    module: nn.Module,
    device: torch.device,
    memory: FSDPConfig,
    optim: OptimizerConfig | None = None,
    grad_clip: float = 0.0,
    gradient_checkpointing: bool = False,
) -> Engine:
    """The engine of a strategy. One process has nothing to shard: fsdp and fsdp2 are `local`."""
    name = "local" if strategy in ("fsdp", "fsdp2") else strategy
    if gradient_checkpointing:
        enable_checkpointing(module)
    return ENGINES[name](module, device, memory, optim, grad_clip)


def save_role(
    engine: Engine, folder: Path, checkpoint: CheckpointConfig, model: ModelConfig
) -> None:
    """Engine state, and a `huggingface` folder with config and tokenizer."""
    engine.save(folder, checkpoint.save_contents)
    target = folder / "huggingface"
    hugging_face = base_module(engine.module)
    hugging_face.config.save_pretrained(target)
    if hugging_face.can_generate():
        hugging_face.generation_config.save_pretrained(target)
    tokenizer = hf_tokenizer(
        model.tokenizer_path or model.path or "",
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )
    tokenizer.save_pretrained(target)
    if hugging_face is not engine.module:
        engine.module.save_pretrained(folder / "lora_adapter")  # type: ignore[operator]
