"""`caldera merge`: a Hugging Face folder out of a checkpoint, checked against it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.logging import disable_progress_bar

from caldera.engine.checkpoints import layout_of
from caldera.errors import ConfigError
from caldera.models.files import WeightFiles, find_weight_files
from caldera.models.forward import base_module
from caldera.tracking import TrainingProgress
from caldera.tracking.console import print_line
from caldera.trainer.merge_check import (
    compare_logits,
    compare_tensors,
    largest_difference,
    load_folder,
    probe_logits,
)
from caldera.trainer.merge_files import (
    LARGEST_FILE,
    copy_descriptions,
    write_weights,
    written_aside,
)
from caldera.trainer.merge_source import CheckpointModel, Reading

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
