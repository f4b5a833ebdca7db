"""`caldera merge`: a Hugging Face folder out of a checkpoint, checked against it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.logging import disable_progress_bar

from caldera.commands.merging.source import ATTENTION, CheckpointModel, Reading
from caldera.engine.checkpoints import layout_of
from caldera.errors import CheckpointError, ConfigError
from caldera.models.files import WeightFiles, find_weight_files
from caldera.models.forward import base_module
from caldera.tracking import TrainingProgress
from caldera.tracking.progress import print_line

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
        _flush(unfinished)
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


def _flush(folder: Path) -> None:
    """Have the files on disk before the rename that declares them complete."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeOptions:
    """What to make of a checkpoint."""

    local_dir: Path
    adapter: Literal["keep", "merge"] = "keep"
    dtype: str | None = None
    """Of the weights that are written; None leaves them as they are."""
    reading: Reading = field(default_factory=Reading)

    @property
    def cast_to(self) -> torch.dtype | None:
        return None if self.dtype is None else DTYPES[self.dtype]


def merge(options: MergeOptions, target: Path) -> None:
    """Write the folder; it is there only if the check finds it equal to the checkpoint."""
    disable_progress_bar()  # of transformers, which would tear our own
    source = CheckpointModel(options.local_dir, options.reading)
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
    source = CheckpointModel(options.local_dir, options.reading)
    adapter = folder / "adapter_model.safetensors"
    if source.has_adapter and adapter.is_file():
        files = WeightFiles([adapter])
        expected = _watched(source.adapter_weights(), len(files.shapes()), "Comparing")
        compare_tensors(expected, files.shapes(), files.tensor, folder)
        return
    found = find_weight_files(str(folder))
    if found is None or _is_converted(base_module(source.empty())):
        remote = options.reading.trust_remote_code
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
    loaded = load_folder(source.factory, folder, dtype, options.reading.trust_remote_code)
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
