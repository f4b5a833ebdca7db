"""Building Hugging Face modules from the config: policies, value and reward models, adapters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from caldera.installation import install_command
from caldera.models.adapters import merged_weights, plain_name, with_adapter
from caldera.models.attention import ATTENTION
from caldera.models.exact import exactness
from caldera.models.exact_norm import in_exactness
from caldera.models.forward import base_module
from caldera.models.pretrained import (
    VALUE_HEAD,
    Loaded,
    Recipe,
    WeightSource,
    fill,
    generation_config_of,
    load_empty,
    load_whole,
)
from caldera.storage import is_fetched, local_path
from caldera.storage.paths import WEIGHT_FILES


def apply_liger(module: nn.Module, key: str) -> None:
    """Let the backbone compute norms, rotary embeddings and gated layers with Liger's kernels.

    Its losses are left out: log-probs come from this package's own head. The library replaces
    classes and functions of the model's family, so models that are built later have them too.
    """
    try:
        library = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ConfigError(
            f"{key}.use_liger=true needs liger-kernel: {install_command('liger')}"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(f"{key}.use_liger=true needs a CUDA device, and there is none")
    backbone = cast(PreTrainedModel, base_module(module).base_model)
    family = backbone.config.model_type
    known = library.MODEL_TYPE_TO_APPLY_LIGER_FN
    if family not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{key}.use_liger=true: takes one of {names}, not a {family!r} model")
    try:
        library._apply_liger_kernel_to_instance(
            backbone, cross_entropy=False, fused_linear_cross_entropy=False
        )
    except TypeError as error:  # of a known family, but not of a class that it patches
        raise ConfigError(f"{key}.use_liger=true: {error}") from error


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


@dataclass(frozen=True)
class Built:
    """A module and, where its parameters are on the meta device, the source of their values."""

    module: nn.Module
    source: WeightSource | None


def load_policy(config: ModelConfig, dtype: torch.dtype, seed: int, key: str) -> nn.Module:
    """A causal language model, with an adapter when the config asks for one."""
    return build_policy(config, dtype, seed, key).module


def build_policy(
    config: ModelConfig, dtype: torch.dtype, seed: int, key: str, empty: bool = False
) -> Built:
    """What `load_policy` loads, without values if it is to be `empty`."""
    loaded = _load(AutoModelForCausalLM, config, dtype, seed, key, empty)
    return _built(loaded, config, "CAUSAL_LM", seed, key, empty)


def build_value_model(
    config: ModelConfig, dtype: torch.dtype, seed: int, key: str, empty: bool = False
) -> Built:
    """A token classifier of one label, whose head starts at small random values.

    If it is to be `empty`, without values.
    """
    with _quiet_transformers():  # which would report at length that the head is not in the files
        loaded = _load(
            AutoModelForTokenClassification, config, dtype, seed, key, empty, num_labels=1
        )
    return _built(loaded, config, "TOKEN_CLS", seed, key, empty)


def build_sequence_classifier(
    config: ModelConfig, dtype: torch.dtype, seed: int, key: str, empty: bool = False
) -> Built:
    """A classifier of whole sequences with one label, to be trained: a reward model to be.

    Where the files have no head, it starts at small random values. If the model is to be `empty`,
    it is without values.
    """
    with _quiet_transformers():  # as above
        loaded = _load(
            AutoModelForSequenceClassification, config, dtype, seed, key, empty, num_labels=1
        )
    _scoring_head(loaded.model, config, key).float()  # in bfloat16 small steps would be lost
    return _built(loaded, config, "SEQ_CLS", seed, key, empty)


def build_reward_model(
    config: ModelSource, dtype: torch.dtype, key: str, empty: bool = False
) -> Built:
    """A sequence classifier of one label, with the head that it was trained with.

    If it is to be `empty`, without values.
    """
    with _quiet_transformers():  # missing weights are reported below
        loaded = _load(AutoModelForSequenceClassification, config, dtype, 0, key, empty)
    model = loaded.model
    if loaded.missing:
        raise ConfigError(
            f"{key}.path={config.path!r} is no trained reward model: its files lack "
            f"{', '.join(loaded.missing)}"
        )
    if model.config.num_labels != 1:
        raise ConfigError(
            f"{key}.path={config.path!r} has {model.config.num_labels} labels: a reward "
            "model has one"
        )
    _scoring_head(model, config, key).float()  # in bfloat16 a score would have three digits
    return Built(model, WeightSource(model, loaded.readers) if empty else None)


def is_language_model(config: ModelSource, key: str) -> bool:
    """Whether the model was saved as one that generates: its architecture ends in ForCausalLM."""
    import_external(config, key)
    folder = _folder(config, key, WEIGHT_FILES)
    with _told_as_config_error(config, key):
        saved = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    return any(name.endswith("ForCausalLM") for name in saved.architectures or ())


def shape_of_policy(config: ModelConfig, key: str) -> nn.Module:
    """What `load_policy` loads, on the meta device: of the model's files config.json is enough."""
    model = _shape(AutoModelForCausalLM, config, key)
    if not config.has_adapter:
        return model
    return with_adapter(model, config, "CAUSAL_LM", 0, key, empty=True)[0]


def shape_of_classifier(config: ModelSource, key: str) -> nn.Module:
    """The same of a model with one output a token instead of a language head."""
    return _shape(AutoModelForTokenClassification, config, key, num_labels=1)


def _shape(factory: Any, config: ModelSource, key: str, **extra: Any) -> PreTrainedModel:
    import_external(config, key)
    folder, remote = _folder(config, key, WEIGHT_FILES), config.trust_remote_code
    with _told_as_config_error(config, key):
        changes = {**config.override_config, **extra}
        found = AutoConfig.from_pretrained(folder, trust_remote_code=remote, **changes)
        with torch.device("meta"):
            model: PreTrainedModel = factory.from_config(
                found, attn_implementation=ATTENTION, trust_remote_code=remote
            )
    if model.can_generate():
        model.generation_config = generation_config_of(str(folder))
    return model


def enable_checkpointing(module: nn.Module) -> None:
    """Recompute activations in the backward pass."""
    model = base_module(module)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": _recomputed})
    if model is not module:  # frozen embeddings would cut the recomputed part off from the loss
        model.enable_input_require_grads()


def _recomputed() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a layer's forward pass, and of its recomputation: both are alike."""
    return nullcontext(), exactness() if in_exactness() else nullcontext()


def exported_weights(
    module: nn.Module,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    state: Mapping[str, Tensor] | None = None,
    merged: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter, adapters `merged` or left out, one at
    a time.

    `state` has the tensors under the module's names where its own state dict would not do, and
    `whole` makes one of them whole where it is sharded; every rank calls it in the same order.
    """
    model = base_module(module)
    state = model.state_dict() if state is None else state
    if model is not module:
        yield from merged_weights(model, state, whole, merged)
        return
    for name, tensor in state.items():
        yield name, whole(tensor)


def save_pretrained(
    module: nn.Module, folder: Path, weights: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """A Hugging Face folder with weights, adapters merged.

    `weights` are those of `exported_weights`, to be given where the module is sharded. Ranks that
    do not write have to go through theirs as well.
    """
    model = base_module(module)
    weights = exported_weights(module) if weights is None else weights
    state = {name: tensor.detach().cpu() for name, tensor in weights}
    for name, source in model.all_tied_weights_keys.items():
        if name in state and source in state and torch.equal(state[name], state[source]):
            state[name] = state[source]  # one memory for both, so that one of them is written
    model.save_pretrained(folder, state_dict=state)


def _load(
    factory: Any,
    config: ModelSource,
    dtype: torch.dtype,
    seed: int,
    key: str,
    empty: bool,
    **extra: Any,
) -> Loaded:
    import_external(config, key)
    folder, remote = _folder(config, key), config.trust_remote_code
    with _told_as_config_error(config, key):
        model_config, unused = AutoConfig.from_pretrained(
            folder,
            return_unused_kwargs=True,
            trust_remote_code=remote,
            **config.override_config,
            **extra,
        )
        recipe = Recipe(factory, folder, model_config, dtype, seed, remote)
        loaded = load_empty(recipe) if empty else load_whole(recipe)
    if unused:
        names = ", ".join(unused)
        raise ConfigError(f"{key}.override_config: the model's config has no {names}")
    return loaded


def check_folder(config: ModelSource, key: str) -> None:
    """Raise ConfigError where the model's folder is missing; nothing is fetched."""
    if not is_fetched(config.path or ""):
        _folder(config, key)


def _folder(config: ModelSource, key: str, skip: tuple[str, ...] = ()) -> str:
    """The model's folder on this machine, or its name on the hub."""
    folder = Path(local_path(config.path or "", f"{key}.path", skip)).expanduser()
    if folder.is_absolute() and not folder.is_dir():
        raise ConfigError(f"{key}.path={config.path!r}: there is no such folder")
    return str(folder)


@contextmanager
def _told_as_config_error(config: ModelSource, key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{key}.path={config.path!r}: no model could be loaded: {first}"
        ) from error


def _scoring_head(model: nn.Module, config: ModelSource, key: str) -> nn.Module:
    head = getattr(model, VALUE_HEAD, None)
    if not isinstance(head, nn.Module):
        raise UnsupportedError(
            f"{key}.path={config.path!r}: {type(model).__name__} has no head named {VALUE_HEAD!r}"
        )
    return head


def _built(
    loaded: Loaded, config: ModelConfig, task: str, seed: int, key: str, empty: bool
) -> Built:
    """The model with the kernels and the adapter that the config asks for."""
    module: nn.Module = loaded.model
    readers = loaded.readers
    if config.use_liger:
        apply_liger(module, key)
    if config.has_adapter:
        module, own = with_adapter(loaded.model, config, task, seed, key, empty)
        if not empty:
            fill(module, own)
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        readers = own | {n: readers[plain_name(n)] for n in names if empty and n not in own}
    return Built(module, WeightSource(module, readers) if empty else None)


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
