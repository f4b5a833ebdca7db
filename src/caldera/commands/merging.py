"""From a checkpoint to a Hugging Face folder, checked against the checkpoint."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.logging import disable_progress_bar

from caldera.engine.checkpoints import StoredModel, layout_of
from caldera.errors import CheckpointError, ConfigError
from caldera.models.adapters import peft_library, plain_name
from caldera.models.files import WeightFiles, find_weight_files
from caldera.models.forward import base_module
from caldera.models.loading import exported_weights
from caldera.models.pretrained import VALUE_HEAD, parameters_on_meta
from caldera.storage.writing import flush
from caldera.tracking import TrainingProgress
from caldera.tracking.progress import print_line
from caldera.trainer.checkpoint import ROLES
from caldera.trainer.checkpoint_manifest import verify

DESCRIPTIONS = "huggingface"
ADAPTER = "lora_adapter"
ATTENTION = "eager"
"""Which every model has, so that what is computed before and after is the same."""


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeOptions:
    """What to make of a checkpoint, and how to read it where its files do not say."""

    local_dir: Path
    adapter: Literal["keep", "merge"] = "keep"
    dtype: str | None = None
    """Of the weights that are written; None leaves them as they are."""
    is_value_model: bool = False
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    hf_model_path: Path | None = None
    """Folder with the config and tokenizer; None: the checkpoint's own."""

    @property
    def cast_to(self) -> torch.dtype | None:
        return None if self.dtype is None else DTYPES[self.dtype]


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

    def __init__(self, options: MergeOptions) -> None:
        self.folder = role_folder(options.local_dir)
        self.descriptions = options.hf_model_path or self.folder / DESCRIPTIONS
        verify(self.folder.parent, self.folder.name)
        self.stored = StoredModel(self.folder)
        if not self.stored.tensors:
            raise CheckpointError(f"{self.folder} holds no model, only other parts of a checkpoint")
        self.has_adapter = any(".lora_" in name for name in self.stored.tensors)
        self.dtype, self.widest_dtype = self._dtypes()
        self._options = options
        parts = {plain_name(name): one for name, one in self.stored.tensors.items()}
        head = parts.get(f"{VALUE_HEAD}.weight")
        self.factory: Any = AutoModelForCausalLM
        labels: dict[str, int] = {}
        if head is not None or options.is_value_model:
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
        config, remote = self.config, self._options.trust_remote_code
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
                trust_remote_code=self._options.trust_remote_code,
                **extra,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.descriptions} does not tell what model this is (--hf-model-path names a "
                f"folder that does): {error}"
            ) from error
        if self._options.tie_word_embedding:
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


# ---- Comparing what was written with what the shards hold

ROWS, LENGTH = 2, 32
"""The shape of the probe."""


def load_folder(
    factory: Any, folder: Path, dtype: torch.dtype | str, trust_remote_code: bool
) -> nn.Module:
    """The folder's model as transformers loads it; nothing may be missing or left over."""
    try:
        model, told = factory.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[kind]:
            names = ", ".join(sorted(str(one) for one in told[kind])[:3])
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')}: {names}")
    loaded: nn.Module = model.eval()
    return loaded


@torch.no_grad()
def probe_logits(module: nn.Module) -> Tensor:
    """Logits (B, T, V) of token ids that are always the same."""
    embedding = cast(nn.Embedding, base_module(module).get_input_embeddings())
    vocabulary = embedding.weight.shape[0]
    numbers = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    logits: Tensor = module(input_ids=numbers * 7919 % vocabulary).logits
    return logits


def compare_logits(written: Tensor, direct: Tensor, folder: Path) -> None:
    """Complain unless the logits of the folder's model are those of the shards, bit for bit."""
    difference = largest_difference(written, direct)
    dtype = str(direct.dtype).removeprefix("torch.")
    told = (
        f"logits of {ROWS} x {LENGTH} probe tokens in {dtype}, model of the folder against model "
        f"of the shards: largest difference {difference:g}"
    )
    if not torch.equal(written, direct):
        raise CheckpointError(f"{folder} is not what the checkpoint holds: {told}")
    print_line(f"Checked: {told}")


def compare_tensors(
    expected: Iterable[tuple[str, Tensor]],
    held: Iterable[str],
    read: Callable[[str], Tensor],
    folder: Path,
) -> None:
    """Complain unless the folder holds each tensor too, equal in the precision that it has there.

    `held` are the names of what it holds, all of which are to be expected.
    """
    left = set(held)
    worst, count, different = 0.0, 0, []
    for name, tensor in expected:
        if name not in left:
            raise CheckpointError(f"{folder} lacks {name}, which the checkpoint holds")
        left.remove(name)
        other = read(name)
        if other.shape != tensor.shape:
            raise CheckpointError(
                f"{folder}: {name} is {tuple(other.shape)}, in the checkpoint {tuple(tensor.shape)}"
            )
        count += 1
        if not torch.equal(other, tensor.to(other.dtype)):
            different.append(name)
            worst = max(worst, largest_difference(other, tensor))
    if left:
        raise CheckpointError(f"{folder} holds {min(left)}, which the checkpoint lacks")
    if different:
        raise CheckpointError(
            f"{folder} is not what the checkpoint holds: {len(different)} of {count} tensors "
            f"differ, {different[0]} first; the largest difference is {worst:g}"
        )
    print_line(f"Checked: {count} tensors of the checkpoint against {folder}: all are equal")


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Between elements at the same place."""
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


# ---- Writing a Hugging Face folder: weights in files of bounded size, all of it aside at first

LARGEST_FILE = 5 * 10**9
"""Bytes of weights in one file; what is being written is in memory."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` if nothing goes wrong."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--target-dir={str(target)!r} exists already and is not empty")
    unfinished = target.with_name(f".{target.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--target-dir={str(target)!r}: no folder can be made there: {error}"
        ) from error
    try:
        yield unfinished
        flush(unfinished)
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def copy_descriptions(source: Path, target: Path) -> None:
    """Everything but weights: configs, tokenizer, templates, code of the model's own."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)


def write_weights(
    weights: Iterable[tuple[str, Tensor]], folder: Path, largest: int = LARGEST_FILE
) -> int:
    """Write safetensors files that transformers loads, while the weights come; returns how many.

    At most one file's worth is in memory at a time.
    """
    files: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    held = total = 0
    for name, tensor in weights:
        if waiting and held + tensor.nbytes > largest:
            files.append(_write_file(waiting, folder, len(files) + 1))
            held = 0
        waiting[name] = tensor.contiguous()
        held += tensor.nbytes
        total += tensor.nbytes
    files.append(_write_file(waiting, folder, len(files) + 1))
    if len(files) == 1:
        (folder / _unnumbered(1)).rename(folder / SAFE_WEIGHTS_NAME)
        return 1
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        final = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / _unnumbered(number)).rename(folder / final)
        places.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))
    return len(files)


def _write_file(waiting: dict[str, Tensor], folder: Path, number: int) -> list[str]:
    save_file(waiting, folder / _unnumbered(number), metadata={"format": "pt"})
    names = list(waiting)
    waiting.clear()
    return names


def _unnumbered(number: int) -> str:
    """A file's name while it is not known how many there will be."""
    return f"model-{number:05}.safetensors"


def merge(options: MergeOptions, target: Path) -> None:
    """Write the folder; it is there only if the check finds it equal to the checkpoint."""
    disable_progress_bar()  # of transformers, which would tear our own
    source = CheckpointModel(options)
    print_line(
        f"Checkpoint: {source.folder} ({layout_of(source.folder)} layout, "
        f"{len(source.stored.tensors)} tensors, {source.nbytes / 1e9:.3g} GB)"
    )
    keeps_adapter = source.has_adapter and options.adapter == "keep"
    with written_aside(target) as folder:
        copy_descriptions(source.descriptions, folder)
        if keeps_adapter:
            _write_adapter(source, options, folder)
            _check_adapter(source, options, folder)
        else:
            _write_model(source, options, folder)
            _check_model(source, options, folder)
    if keeps_adapter:
        base = json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]
        print_line(f"Adapter: {target}, of {base or 'a model that it does not name'}")
    else:
        print_line(f"Model: {target}")


def compare(options: MergeOptions, folder: Path) -> None:
    """Compare a folder that exists with the checkpoint, tensor by tensor."""
    disable_progress_bar()
    if not folder.is_dir():
        raise ConfigError(f"--test-hf-dir={str(folder)!r}: there is no such folder")
    source = CheckpointModel(options)
    adapter = folder / "adapter_model.safetensors"
    if source.has_adapter and adapter.is_file():
        files = WeightFiles([adapter])
        expected = _watched(source.adapter_weights(), len(files.shapes()), "Comparing")
        compare_tensors(expected, files.shapes(), files.tensor, folder)
        return
    found = find_weight_files(str(folder))
    if found is None or _is_converted(base_module(source.empty())):
        remote = options.trust_remote_code
        state = load_folder(source.factory, folder, "auto", remote).state_dict()
        names, read = set(state), cast(Callable[[str], Tensor], state.__getitem__)
    else:
        names, read = set(found.shapes()), found.tensor
    expected = _watched(source.whole_weights(), source.whole_count, "Comparing")
    compare_tensors(expected, names - source.tied.keys(), read, folder)


def _is_converted(module: PreTrainedModel) -> bool:
    """Whether transformers stores such a model under other names, which it makes of all at once."""
    return bool(get_model_conversion_mapping(module, add_legacy=False))


def _write_model(source: CheckpointModel, options: MergeOptions, folder: Path) -> None:
    module = base_module(source.empty())
    config = source.config
    config.architectures = [type(module).__name__]
    config.dtype = options.cast_to or source.dtype
    config.save_pretrained(folder)
    weights = _cast(source.whole_weights(), options.cast_to)
    weights = _watched(weights, source.whole_count, "Writing")
    if _is_converted(module):
        module.save_pretrained(folder, state_dict=dict(weights), max_shard_size=LARGEST_FILE)
        return
    files = write_weights(weights, folder)
    print_line(f"Written: {files} file{'s' if files > 1 else ''} of weights")


def _check_model(source: CheckpointModel, options: MergeOptions, folder: Path) -> None:
    dtype = options.cast_to or source.widest_dtype
    apart = None
    direct = source.filled()
    if source.has_adapter:
        direct = source.merged(direct)
        apart = _logits(source.filled(), None, source.widest_dtype)
    expected = _logits(direct, options.cast_to, dtype)
    del direct
    loaded = load_folder(source.factory, folder, dtype, options.trust_remote_code)
    compare_logits(probe_logits(loaded), expected, folder)
    if apart is not None:
        difference = largest_difference(expected, apart)
        print_line(f"Merging has rounded: largest difference from the adapter apart {difference:g}")


def _write_adapter(source: CheckpointModel, options: MergeOptions, folder: Path) -> None:
    for path in source.adapter_folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, folder)
    weights = dict(_cast(source.adapter_weights(), options.cast_to))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_adapter(source: CheckpointModel, options: MergeOptions, folder: Path) -> None:
    dtype = options.cast_to or source.widest_dtype
    expected = _logits(source.filled(), options.cast_to, dtype)
    written = _logits(source.with_adapter_of(folder), options.cast_to, dtype)
    compare_logits(written, expected, folder)


def _logits(module: nn.Module, cast_to: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """The probe's logits, computed in `dtype` with weights that were cast as those in the files."""
    for parameter in module.parameters():  # not buffers, which stay precise in transformers too
        parameter.data = parameter.data.to(cast_to or parameter.dtype).to(dtype)
    return probe_logits(module)


def _cast(
    weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        casts = dtype is not None and tensor.is_floating_point()
        yield name, tensor.to(dtype) if casts else tensor


def _watched(
    weights: Iterator[tuple[str, Tensor]], count: int, description: str
) -> Iterator[tuple[str, Tensor]]:
    """The same, with a bar that tells how many are done and how long the rest will take."""
    with TrainingProgress(count, description=description, unit="tensor") as progress:
        gigabytes = 0.0
        for number, (name, tensor) in enumerate(weights, start=1):
            yield name, tensor
            gigabytes += tensor.nbytes / 1e9
            progress.update(number, GB=gigabytes)
