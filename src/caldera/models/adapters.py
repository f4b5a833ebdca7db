"""LoRA adapters by peft: fresh and saved ones, and what they come to when they are merged."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from caldera.config import ModelConfig
from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.models.files import WeightFiles
from caldera.models.pretrained import VALUE_HEAD, Reader, initialised, parameters_on_meta, seeded
from caldera.seeds import derive_seed
from caldera.storage import local_path

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""peft's name for the only adapter that a module has."""
PREFIX = "base_model.model."
"""The prefix that peft puts before the names of the model's parameters."""
NOT_MERGED = ("lora_bias", "trainable_token_indices", "target_parameters", "layer_replication")
"""Keys of a saved adapter that ask for more than low-rank matrices."""
STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initial values of a saved adapter; the other kinds changed the model's own weights as well."""
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
"""Parts that sharding, checkpointing and compiling put into the names of modules."""


def peft_library(asked: str) -> Any:
    """peft, which is imported here alone; `asked` is what needs it."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"{asked} needs peft: {install_command('lora')}") from error
    return peft


def with_adapter(
    model: PreTrainedModel, config: ModelConfig, task: str, seed: int, key: str, empty: bool
) -> tuple[nn.Module, dict[str, Reader]]:
    """The model with an adapter, and readers of the values that come with the adapter."""
    folder = config.lora_adapter_path
    if folder is not None:
        folder = str(local_path(folder, f"{key}.lora_adapter_path"))
    asked = f"{key}.lora_rank={config.lora_rank}"
    if folder is not None:
        asked = f"{key}.lora_adapter_path={folder!r}"
    peft = peft_library(asked)
    if folder is None:
        lora = _new_config(config, task, peft)
    else:
        lora = _saved_config(folder, task, asked, peft)
    if folder is not None and config.lora_rank not in (0, lora.r):
        logger.warning("%s: its rank is %d, not %d", asked, lora.r, config.lora_rank)
    try:
        with seeded(seed), parameters_on_meta() if empty else nullcontext():
            module = cast(nn.Module, peft.get_peft_model(model, lora))
    except ValueError as error:
        first = str(error).splitlines()[0]
        if folder is None:
            asked = f"{key}.target_modules={config.target_modules!r}"
        raise ConfigError(f"{asked}: {first}") from error
    if folder is None:
        return module, _fresh_readers(module, seed)
    return module, _saved_readers(module, folder, asked)


def plain_name(name: str) -> str:
    """The Hugging Face name of a parameter that an adapter renamed."""
    name = name.removeprefix(PREFIX)
    return re.sub(rf"\.(base_layer|original_module|modules_to_save\.{ADAPTER})\.", ".", name)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a Hugging Face model that have an adapter, by the names that they had."""
    return {
        WRAPPERS.sub("", name): layer
        for name, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


def merged_weights(
    model: nn.Module,
    state: Mapping[str, Tensor],
    whole: Callable[[Tensor], Tensor],
    merged: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of each parameter in the state of a model with adapters.

    The state's names may have peft's prefix or not. Adapters are `merged`, or left out.
    """
    layers = adapted_layers(model) if merged else {}
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    for name, tensor in state.items():
        if ".lora_" in name or ".original_module." in name:
            continue
        value = whole(tensor)
        adapted = name.removesuffix(".base_layer.weight")
        if adapted in layers:
            value = value + _delta(layers[adapted], adapted, state, whole).to(value)
        yield plain_name(name), value


def _delta(
    layer: Any, name: str, state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """The adapter's addend to a layer's weight, in float32 or better."""
    embedding = ADAPTER in layer.lora_embedding_A
    ends = [
        f"lora_embedding_{x}.{ADAPTER}" if embedding else f"lora_{x}.{ADAPTER}.weight" for x in "AB"
    ]
    a, b = (whole(state[f"{name}.{end}"]) for end in ends)  # (r, in), (out, r)
    dtype = torch.promote_types(a.dtype, torch.float32)
    delta: Tensor = b.to(dtype) @ a.to(dtype) * layer.scaling[ADAPTER]
    return delta.T if embedding or layer.fan_in_fan_out else delta


def _new_config(config: ModelConfig, task: str, peft: Any) -> Any:
    return peft.LoraConfig(
        task_type=task,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules,
        exclude_modules=_excluded(config.exclude_modules, task),
        bias="none",
    )


def _excluded(modules: Any, task: str) -> Any:
    """A classifier's head is trained whole, which peft takes for granted, so it gets no adapter."""
    if task == "CAUSAL_LM":
        return modules
    if isinstance(modules, str):
        return f"(?:{modules})|(?:{VALUE_HEAD})"
    return [*(modules or []), VALUE_HEAD]


def _saved_config(folder: str, task: str, asked: str, peft: Any) -> Any:
    """The config of a plain LoRA adapter that was saved, to be trained on."""
    file = Path(folder).expanduser() / "adapter_config.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{asked}: {file.name} cannot be read: {error}") from error
    if told.get("peft_type") != "LORA":
        raise ConfigError(f"{asked}: takes a LoRA adapter, not {told.get('peft_type')!r}")
    if told.get("task_type") not in (None, task):
        raise ConfigError(f"{asked}: it was made for {told['task_type']}, this model is {task}")
    odd = [name for name in NOT_MERGED if told.get(name)]
    if told.get("bias", "none") != "none":  # biases are not saved with adapters
        odd.append("bias")
    if told.get("init_lora_weights", True) not in STARTS:
        odd.append("init_lora_weights")
    if odd:
        raise ConfigError(f"{asked}: takes a plain adapter, this one has {odd[0]}={told[odd[0]]!r}")
    try:
        lora = peft.PeftConfig.from_pretrained(str(file.parent))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{asked}: peft cannot use {file.name}: {error}") from error
    lora.task_type, lora.inference_mode, lora.init_lora_weights = task, False, True
    lora.base_model_name_or_path = None  # the place of the model then, which may have changed
    return lora


def _fresh_readers(module: nn.Module, seed: int) -> dict[str, Reader]:
    def reset(layer: Any) -> None:
        layer.reset_lora_parameters(ADAPTER, True)

    readers = {}
    for name, _ in module.named_parameters():
        layer, found, rest = name.partition(".lora_")
        if found:
            owner = module.get_submodule(layer)
            readers[name] = initialised(owner, f"lora_{rest}", reset, derive_seed(seed, name))
    return readers


def _saved_readers(module: nn.Module, folder: str, asked: str) -> dict[str, Reader]:
    """Readers of a saved adapter's values; every one must have its place in the module."""
    if any(getattr(layer, "lora_variant", None) for layer in module.modules()):
        raise ConfigError(f"{asked}: takes a plain adapter, not a variant such as DoRA")
    try:
        files = WeightFiles([Path(folder).expanduser() / "adapter_model.safetensors"])
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{asked}: adapter_model.safetensors cannot be read: {error}") from error
    places = {saved_name(name): (name, p) for name, p in module.named_parameters()}
    own = {saved for saved, (name, _) in places.items() if saved != name}
    shapes = files.shapes()
    for name in sorted(own - shapes.keys()):
        raise ConfigError(f"{asked} does not fit the model: its file lacks {name}")
    for name in sorted(shapes.keys() - places.keys()):
        raise ConfigError(f"{asked} does not fit the model, which has no {name}")
    for name, shape in shapes.items():
        expected = tuple(places[name][1].shape)
        if shape != expected:
            raise ConfigError(f"{asked} does not fit the model: {name} is {shape}, not {expected}")
    return {places[name][0]: partial(files.tensor, name) for name in shapes}


def saved_name(name: str) -> str:
    """The name of a parameter in an adapter's file, where only the adapter's own are renamed."""
    name = re.sub(rf"\.modules_to_save\.{ADAPTER}\.", ".", name)
    return re.sub(rf"(\.lora_\w+)\.{ADAPTER}", r"\1", name)
