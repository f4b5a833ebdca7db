"""The bundle of a run: all that is needed to repeat it, and to tell what has changed since."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import caldera
from caldera.config import config_to_yaml
from caldera.config.fields import walk
from caldera.errors import DataError
from caldera.tracking.dumps import write_text_atomic
from caldera.trainer.bundle_files import fingerprints

__all__ = ["COMMAND_VARIABLE", "command_line", "read_bundle", "surroundings", "write_bundle"]

FORMAT = 1
FILE = "bundle.json"
COMMAND_VARIABLE = "CALDERA_COMMAND"
"""The command line, as JSON, for a driver that is another process than the one it was given to."""
KEPT_VARIABLES = ("CALDERA_", "CUDA_VISIBLE_DEVICES", "HF_HUB_", "OMP_", "PYTHONHASHSEED", "VERL_")
SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
GIT_S = 10.0


def write_bundle(folder: Path, config: Any, output_key: str) -> Path:
    """Write `bundle.json` and the resolved config; `output_key` says where the run writes to."""
    bundle = {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "directory": os.getcwd(),
        "output_key": output_key,
        "seeds": {key: value for key, _, value in walk(config) if key.endswith("seed")},
        "environment": _environment(),
        **surroundings(),
        "files": fingerprints(config),
    }
    write_text_atomic(folder / "config.yaml", [config_to_yaml(config)])
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
    return list(json.loads(given)) if given else list(sys.orig_argv)


def surroundings() -> dict[str, Any]:
    """Versions of everything that the run's numbers may depend on."""
    return {
        "caldera": caldera.__version__,
        "git": _git_state(Path(caldera.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(
            sorted({str(d.name): d.version for d in distributions() if d.name}.items())
        ),
    }


def _environment() -> dict[str, str]:
    """Variables that change what a run does, without anything secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(KEPT_VARIABLES)
        and name != COMMAND_VARIABLE
        and not any(word in name for word in SECRETS)
    }


def _git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of Caldera's own code and whether it was changed; None: it is no checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "is_changed": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
