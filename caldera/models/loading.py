"""Building Hugging Face modules from the config: policies, value and reward models, adapters."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from caldera.config import ModelConfig
from caldera.errors import ConfigError, UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.models.forward import base_module

VALUE_HEAD = "score"
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


class ModelSource(Protocol):
    """Where a model comes from: the keys that every role's model has."""

    path: str | None
    external_lib: str | None
    trust_remote_code: bool
    override_config: dict[str, Any]


def load_policy(config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> nn.Module:
    """A causal language model, with an adapter when the config asks for one."""
    model, _ = _load(AutoModelForCausalLM, config, dtype, seed, key)
    return _with_adapter(model, config, "CAUSAL_LM", seed, key)


def load_value_model(config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> nn.Module:
    """A token classifier of one label, whose head starts at small random values."""
    with _quiet_transformers():  # which would report at length that the head is not in the files
        model, _ = _load(AutoModelForTokenClassification, config, dtype, seed, key, num_labels=1)
    return _with_adapter(model, config, "TOKEN_CLS", seed, key)


def load_reward_model(config: ModelSource, dtype: torch.dtype, key: str) -> PreTrainedModel:
    """A sequence classifier of one label, with the head that it was trained with."""
    with _quiet_transformers():  # what is missing is told below
        model, missing = _load(AutoModelForSequenceClassification, config, dtype, 0, key)
    if missing:
        raise ConfigError(
            f"{key}.path={config.path!r} is no trained reward model: its files lack "
            f"{', '.join(missing)}"
        )
    if model.config.num_labels != 1:
        raise ConfigError(
            f"{key}.path={config.path!r} tells {model.config.num_labels} labels apart: a reward "
            "model has one"
        )
    if not isinstance(getattr(model, VALUE_HEAD, None), nn.Module):
        raise UnsupportedError(
            f"{key}.path={config.path!r}: {type(model).__name__} has no head named {VALUE_HEAD!r}"
        )
    getattr(model, VALUE_HEAD).float()  # in bfloat16 a score would have three digits
    return model


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
        if ".lora_" in name or ".original_module." in name:
            continue
        layer = cast(Any, deltas.get(name))
        merged = tensor if layer is None else tensor + layer.get_delta_weight("default").to(tensor)
        yield name.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."), merged


def save_pretrained(module: nn.Module, folder: Path) -> None:
    """A Hugging Face folder with weights, adapters merged."""
    state = {name: tensor.detach().cpu() for name, tensor in exported_weights(module)}
    base_module(module).save_pretrained(folder, state_dict=state)


def _load(
    factory: Any, config: ModelSource, dtype: torch.dtype, seed: int, key: str, **extra: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the parameters that are fresh: its files lack them."""
    import_external(config, key)
    folder = Path(config.path or "").expanduser()
    if folder.is_absolute() and not folder.is_dir():
        raise ConfigError(f"{key}.path={config.path!r}: there is no such folder")
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        model_config, unused = AutoConfig.from_pretrained(
            str(folder), return_unused_kwargs=True, **options, **config.override_config, **extra
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, told = factory.from_pretrained(
                str(folder), config=model_config, dtype=dtype, attn_implementation=ATTENTION,
                output_loading_info=True, **options,
            )  # fmt: skip
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{key}.path={config.path!r}: no model could be loaded: {first}"
        ) from error
    if unused:
        names = ", ".join(unused)
        raise ConfigError(f"{key}.override_config: the model's config has no {names}")
    return cast(PreTrainedModel, model), sorted(told["missing_keys"])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def import_external(config: ModelSource, key: str) -> None:
    """Import the modules that `external_lib` names."""
    for name in filter(None, (part.strip() for part in (config.external_lib or "").split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"{key}.external_lib: cannot import {name!r}: {error}") from error


def _with_adapter(
    model: PreTrainedModel, config: ModelConfig, task: str, seed: int, key: str
) -> nn.Module:
    if config.lora_rank == 0:
        return model
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"{key}.lora_rank={config.lora_rank} needs peft: pip install 'caldera[lora]'"
        ) from error
    lora = peft.LoraConfig(
        task_type=task,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules,
        exclude_modules=_excluded(config.exclude_modules, task),
        bias="none",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return cast(nn.Module, peft.get_peft_model(model, lora))
        except ValueError as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"{key}.target_modules={config.target_modules!r}: {first}") from error


def _excluded(modules: Any, task: str) -> Any:
    """A value head is trained whole, which peft takes for granted, so it gets no adapter."""
    if task != "TOKEN_CLS":
        return modules
    if isinstance(modules, str):
        return f"(?:{modules})|(?:{VALUE_HEAD})"
    return [*(modules or []), VALUE_HEAD]
