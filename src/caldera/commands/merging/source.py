"""The model of a checkpoint: which one it is, and its weights, one at a time."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from caldera.engine.checkpoints import StoredModel, layout_of
from caldera.errors import CheckpointError
from caldera.models.adapters import peft_library, plain_name
from caldera.models.forward import base_module
from caldera.models.loading import exported_weights
from caldera.models.pretrained import VALUE_HEAD, parameters_on_meta
from caldera.tracking import TrainingProgress
from caldera.trainer.checkpoint import ROLES
from caldera.trainer.checkpoint_manifest import verify

DESCRIPTIONS = "huggingface"
ADAPTER = "lora_adapter"
ATTENTION = "eager"
"""Which every model has, so that what is computed before and after is the same."""


@dataclass(frozen=True)
class Reading:
    """How to read a checkpoint where its files do not say."""

    is_value_model: bool = False
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    hf_model_path: Path | None = None
    """Folder with the config and tokenizer; None: the checkpoint's own."""


def role_folder(folder: Path) -> Path:
    """The folder of one role: that itself, or the actor's of a `global_step_N`."""
    if not folder.is_dir():
        raise CheckpointError(f"--local-dir={str(folder)!r}: there is no such folder")
    for role in ROLES:
        if (folder / role).is_dir():
            return folder / role
    layout_of(folder)  # complains if there is nothing of a checkpoint in it
    return folder


class CheckpointModel:
    """A role's model, of which nothing is in memory."""

    def __init__(self, folder: Path, reading: Reading) -> None:
        self.folder = role_folder(folder)
        self.descriptions = reading.hf_model_path or self.folder / DESCRIPTIONS
        verify(self.folder.parent, self.folder.name)
        self.stored = StoredModel(self.folder)
        if not self.stored.tensors:
            raise CheckpointError(f"{self.folder} holds no model, only other parts of a checkpoint")
        self.has_adapter = any(".lora_" in name for name in self.stored.tensors)
        self.dtype, self.widest_dtype = self._dtypes()
        self._reading = reading
        parts = {plain_name(name): one for name, one in self.stored.tensors.items()}
        head = parts.get(f"{VALUE_HEAD}.weight")
        self.factory: Any = AutoModelForCausalLM
        labels: dict[str, int] = {}
        if head is not None or reading.is_value_model:
            # The heads of transformers' token classifiers have a bias, those of sequences do not.
            of_tokens = head is None or f"{VALUE_HEAD}.bias" in parts
            self.factory = (
                AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
            )
            labels["num_labels"] = head.shape[0] if head is not None else 1
        self.config = self._read_config(**labels)
        self._check_names()

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.stored.tensors.values())

    @property
    def adapter_folder(self) -> Path:
        """The adapter in peft's format, which tells its settings."""
        folder = self.folder / ADAPTER
        if not (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder}/adapter_config.json is missing: it tells what the adapter in "
                f"{self.folder} is"
            )
        return folder

    def empty(self, with_adapter: bool = True) -> nn.Module:
        """The module without values, with its adapter if it has one."""
        config, remote = self.config, self._reading.trust_remote_code
        with parameters_on_meta():
            module = cast(
                nn.Module,
                self.factory.from_config(
                    config,
                    dtype=self.dtype,
                    attn_implementation=ATTENTION,
                    trust_remote_code=remote,
                ),
            )
            if self.has_adapter and with_adapter:
                peft = peft_library("this checkpoint's adapter")
                settings = peft.PeftConfig.from_pretrained(str(self.adapter_folder))
                settings.base_model_name_or_path = None  # else peft warns that it is another
                module = cast(nn.Module, peft.get_peft_model(module, settings))
        return module.eval()

    def filled(self, with_adapter: bool = True) -> nn.Module:
        """The module with the values of the checkpoint's shards, in their own precision."""
        places = {name: name for name in self.stored.tensors}
        if self.has_adapter and not with_adapter:
            places = {plain_name(name): name for name in _without_adapter(places)}
        return _fill(self.empty(with_adapter), lambda name: self.stored.tensor(places[name]))

    def merged(self, module: nn.Module) -> nn.Module:
        """A module without adapter that computes as the given one, which has one."""
        weights = dict(exported_weights(module))
        return _fill(self.empty(with_adapter=False), weights.__getitem__)

    def with_adapter_of(self, folder: Path) -> nn.Module:
        """The module with the values of the shards, but for the adapter, which is the folder's."""
        base = cast(Any, self.filled(with_adapter=False))
        loaded = peft_library("this checkpoint's adapter").PeftModel.from_pretrained(
            base, str(folder)
        )
        return cast(nn.Module, loaded.eval())

    @functools.cached_property
    def tied(self) -> dict[str, str]:
        """Hugging Face names of tensors that are the same as another, with that one's name."""
        return dict(base_module(self.empty()).all_tied_weights_keys)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the model, an adapter merged; of tied ones the first."""
        module = self.empty()
        # Handles, which say for each tensor where it is when it is asked for.
        handles = {name: torch.empty(0, device="meta") for name in self.stored.tensors}
        names = {id(handle): name for name, handle in handles.items()}
        weights = exported_weights(
            module, lambda handle: self.stored.tensor(names[id(handle)]), handles
        )
        for name, tensor in weights:
            if name not in self.tied:
                yield name, tensor
            elif not torch.equal(tensor, self._plain(self.tied[name])):
                raise CheckpointError(
                    f"{self.folder}: {name} and {self.tied[name]} differ, but are tied by "
                    "--tie-word-embedding or the model's config"
                )

    @property
    def whole_count(self) -> int:
        """How many tensors `whole_weights` yields."""
        names = {plain_name(name) for name in self.stored.tensors if ".lora_" not in name}
        return len(names - self.tied.keys())

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in an adapter's file, tensor) of the adapter and of what is trained with it."""
        for name in self.stored.tensors:
            if ".lora_" in name or ".modules_to_save." in name:
                yield _name_in_adapter(name), self.stored.tensor(name)

    def _plain(self, name: str) -> Tensor:
        (place,) = (one for one in _without_adapter(self.stored.tensors) if plain_name(one) == name)
        return self.stored.tensor(place)

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The precision that most of the model has, and one that holds all of it."""
        elements: Counter[torch.dtype] = Counter()
        for one in self.stored.tensors.values():
            if one.dtype.is_floating_point:
                elements[one.dtype] += math.prod(one.shape)
        return elements.most_common(1)[0][0], functools.reduce(torch.promote_types, elements)

    def _read_config(self, **extra: int) -> PreTrainedConfig:
        try:
            config = AutoConfig.from_pretrained(
                str(self.descriptions),
                trust_remote_code=self._reading.trust_remote_code,
                **extra,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.descriptions} does not tell what model this is (--hf-model-path names a "
                f"folder that does): {error}"
            ) from error
        if self._reading.tie_word_embedding:
            config.tie_word_embeddings = True
        return cast(PreTrainedConfig, config)

    def _check_names(self) -> None:
        module = self.empty()
        needed = {name for name in module.state_dict() if plain_name(name) not in self.tied}
        missing = needed - self.stored.tensors.keys()
        unexpected = self.stored.tensors.keys() - module.state_dict().keys()
        if missing or unexpected:
            kind, name = ("lacks", min(missing)) if missing else ("has besides", min(unexpected))
            raise CheckpointError(
                f"{self.folder} is no {type(base_module(module)).__name__}, as "
                f"{self.descriptions}/config.json has it: the checkpoint {kind} {name}"
            )


def _fill(module: nn.Module, read: Callable[[str], Tensor]) -> nn.Module:
    """Give an empty module its values."""
    made: dict[int, nn.Parameter] = {}  # tied weights stay tied
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = [name for name, _ in module.named_buffers() if name in module.state_dict()]
    with TrainingProgress(len(parameters), description="Checking", unit="tensor") as progress:
        for number, (name, empty) in enumerate(parameters, start=1):
            if id(empty) not in made:
                made[id(empty)] = nn.Parameter(read(name), requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = made[id(empty)]
            progress.update(number)
    for name in buffers:
        module.get_buffer(name).copy_(read(name))
    return module


def _without_adapter(names: Iterable[str]) -> Iterator[str]:
    """The names of what a model without the adapter consists of."""
    for name in names:
        if ".lora_" not in name and ".modules_to_save." not in name:
            yield name


def _name_in_adapter(name: str) -> str:
    return re.sub(r"(\.lora_\w+)\.default", r"\1", name.replace(".modules_to_save.default.", "."))
