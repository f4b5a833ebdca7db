"""Building Hugging Face modules from the config: policies, value models, adapters."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from caldera.config import ModelConfig
from caldera.errors import ConfigError
from caldera.models.attention import ATTENTION
from caldera.models.forward import base_module

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def load_policy(config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> nn.Module:
    """A causal language model, with an adapter when the config asks for one."""
    model = _load(AutoModelForCausalLM, config, dtype, seed, key)
    return _with_adapter(model, config, "CAUSAL_LM", seed)


def load_value_model(config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> nn.Module:
    """A token classifier of one label, whose head starts at small random values."""
    model = _load(AutoModelForTokenClassification, config, dtype, seed, key, num_labels=1)
    return _with_adapter(model, config, "TOKEN_CLS", seed)


def enable_checkpointing(module: nn.Module) -> None:
    """Recompute activations in the backward pass."""
    model = base_module(module)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if model is not module:  # frozen embeddings would cut the recomputed part off from the loss
        model.enable_input_require_grads()


def exported_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every parameter, adapters merged."""
    model = base_module(module)
    if model is module:
        yield from module.state_dict().items()
        return
    deltas = {
        f"{name}.base_layer.weight": layer
        for name, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        layer = cast(Any, deltas.get(name))
        merged = tensor if layer is None else tensor + layer.get_delta_weight("default").to(tensor)
        yield name.replace(".base_layer.", "."), merged


def save_pretrained(module: nn.Module, folder: Path) -> None:
    """A Hugging Face folder with weights, adapters merged."""
    state = {name: tensor.detach().cpu() for name, tensor in exported_weights(module)}
    base_module(module).save_pretrained(folder, state_dict=state)


def _load(
    factory: Any, config: ModelConfig, dtype: torch.dtype, seed: int, key: str, **extra: Any
) -> PreTrainedModel:
    for name in (config.external_lib or "").split(","):
        if name.strip():
            importlib.import_module(name.strip())
    path = str(Path(config.path or "").expanduser())
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        model_config = AutoConfig.from_pretrained(path, **options, **config.override_config)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = factory.from_pretrained(
                path, config=model_config, dtype=dtype, attn_implementation=ATTENTION,
                **options, **extra,
            )  # fmt: skip
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{key}.path={config.path!r}: no model could be loaded: {first}") from error
    return cast(PreTrainedModel, model)


def _with_adapter(model: PreTrainedModel, config: ModelConfig, task: str, seed: int) -> nn.Module:
    if config.lora_rank == 0:
        return model
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora_rank={config.lora_rank} needs peft: pip install 'caldera[lora]'"
        ) from error
    lora = peft.LoraConfig(
        task_type=task,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        bias="none",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cast(nn.Module, peft.get_peft_model(model, lora))
