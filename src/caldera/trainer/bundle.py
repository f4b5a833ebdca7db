"""The bundle of a run: all that is needed to repeat it, and to tell what has changed since."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import caldera
from caldera.config.fields import walk
from caldera.errors import DataError
from caldera.installation import commit
from caldera.storage.writing import write_text_atomic
from caldera.trainer.secrets import (
    SHOWN_VARIABLES,
    is_shown_variable,
    masked_arguments,
    masked_text,
    masked_yaml,
)

# ---- Fingerprints of the files that a run reads

BLOCK = 2**20
HASHED_WHOLE = 64 * BLOCK
"""Files up to this size are read to their end."""
SAMPLES = 16
"""Blocks that are read of larger ones, evenly spaced: training changes all of a model's weights."""
READS = re.compile(r"(^|_)(path|files|pretrain|tokenizer)$")
"""The last part of keys that name what a run reads."""
WRITES = frozenset({"output_path", "save_path", "resume_from_path", "dist_checkpointing_path"})
"""Those that match, and do not."""
FUNCTION = re.compile(r"(.+\.py):\w+")
"""A function of a file, which any key may name."""
UNREADABLE = "unreadable"

Fingerprint = dict[str, Any]


def fingerprint(path: Path) -> Fingerprint:
    """Size and SHA-256 of a file; of a large one, that of a sample; or why it cannot be read."""
    try:
        return _fingerprint(path)
    except OSError as error:
        return {UNREADABLE: str(error.strerror)}


def _fingerprint(path: Path) -> Fingerprint:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= HASHED_WHOLE:
            return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        digest = hashlib.sha256()
        for number in range(SAMPLES):
            file.seek((size - BLOCK) * number // (SAMPLES - 1))
            digest.update(file.read(BLOCK))
    return {"bytes": size, "sampled_sha256": digest.hexdigest()}


def fingerprints(config: Any) -> dict[str, dict[str, Fingerprint]]:
    """Key -> file -> fingerprint, of all files on this machine that the config's keys name.

    What is no file here, such as a name on a hub or a URL, has no fingerprint: its dict is empty.
    """
    found: dict[str, dict[str, Fingerprint]] = {}
    for key, _, value in walk(config):
        last = key.rpartition(".")[2]
        is_read = bool(READS.search(last)) and last not in WRITES
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str) or not text:
                continue
            function = FUNCTION.fullmatch(text)
            if is_read or function:
                named = function[1] if function else text
                path = Path(named.removeprefix("file://")).expanduser()
                found.setdefault(key, {}).update(_of(path))
    return found


def _of(path: Path) -> dict[str, Fingerprint]:
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [file for file in files if file.is_file()]
    except OSError as error:  # a folder that one may not look into
        return {str(path.absolute()): {UNREADABLE: str(error.strerror)}}
    return {str(file.absolute()): fingerprint(file) for file in files}


FORMAT = 2
FILE = "bundle.json"
COMMAND_VARIABLE = "CALDERA_COMMAND"
"""The command line, as JSON, for a driver that is another process than the one it was given to."""
PASSED_ON = ("CALDERA_", "HF_HUB_", "VERL_")
"""Beginnings of the variables that such a driver has from the user's shell."""


def write_bundle(folder: Path, config: Any, output_key: str) -> Path:
    """Write `bundle.json` and the resolved config; `output_key` says where the run writes to."""
    # Ray gives its actors a CUDA_VISIBLE_DEVICES and an OMP_NUM_THREADS of their own.
    prefixes = PASSED_ON if COMMAND_VARIABLE in os.environ else SHOWN_VARIABLES
    bundle = {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": masked_arguments(command_line()),
        "nodes": _torchrun_nodes() or 1,
        "directory": os.getcwd(),
        "output_key": output_key,
        "seeds": {key: value for key, _, value in walk(config) if key.endswith("seed")},
        "variables": list(prefixes),
        "environment": variables(prefixes),
        **surroundings(),
        "files": fingerprints(config),
    }
    write_text_atomic(folder / "config.yaml", [masked_yaml(config)])
    write_text_atomic(folder / FILE, [json.dumps(bundle, indent=2, ensure_ascii=False), "\n"])
    return folder


def read_bundle(path: Path) -> dict[str, Any]:
    """A bundle by its folder, by its file, or by the folder of its run."""
    candidates = (path, path / FILE, path / "bundle" / FILE)
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise DataError(f"{path}: no bundle: neither {FILE} nor bundle/{FILE} is there")
    try:
        bundle = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file}: no bundle: {error}") from error
    if not isinstance(bundle, dict) or bundle.get("format") != FORMAT:
        raise DataError(f"{file}: no bundle of format {FORMAT}")
    return bundle


def command_line() -> list[str]:
    """The command of this run, the interpreter first."""
    given = os.environ.get(COMMAND_VARIABLE)
    if given:
        return list(json.loads(given))
    nodes = _torchrun_nodes()
    return list(sys.orig_argv) if nodes is None else _torchrun_command(nodes)


def _torchrun_nodes() -> int | None:
    """The machines of torchrun's run; None: this process is none of torchrun's."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def _torchrun_command(nodes: int) -> list[str]:
    """What starts all processes, one of which is this. Where several machines meet is unknown."""
    python, *arguments = sys.orig_argv
    if arguments[:1] == ["-u"]:  # torchrun's own
        arguments = arguments[1:]
    place = "--standalone" if nodes == 1 else f"--nnodes={nodes}"
    processes = f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"
    return [python, "-m", "torch.distributed.run", place, processes, *arguments]


def surroundings() -> dict[str, Any]:
    """Versions of everything that the run's numbers may depend on."""
    code = commit()
    return {
        "caldera": caldera.__version__,
        "git": None if code is None else {"commit": code.hash, "is_changed": code.is_changed},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
    }


@cache
def _packages() -> dict[str, str]:
    """Name -> version of all that is installed. Each is read once, for that takes long."""
    found = (distribution.metadata for distribution in distributions())
    return dict(sorted({str(m["Name"]): m["Version"] for m in found if m["Name"]}.items()))


def variables(prefixes: Sequence[str]) -> dict[str, str]:
    """Variables that change what a run does, of those that begin so, without anything secret."""
    return {
        name: masked_text(value)
        for name, value in sorted(os.environ.items())
        if is_shown_variable(name) and name.startswith(tuple(prefixes)) and name != COMMAND_VARIABLE
    }
