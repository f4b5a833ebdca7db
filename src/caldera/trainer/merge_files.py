"""Writing a Hugging Face folder: weights in files of bounded size, all of it aside at first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from caldera.errors import ConfigError

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
