"""`caldera repeat BUNDLE`: what has changed since a run, and the command that repeats it."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caldera.errors import DataError
from caldera.trainer.bundle import read_bundle, surroundings
from caldera.trainer.bundle_files import fingerprint
from caldera.trainer.entry import run_entry_point

HELP = """\
Show the command of a run and what has changed since: versions, code, data, model.
A run writes its bundle into its folder. With --run the command is run.

  caldera repeat checkpoints/PROJECT/EXPERIMENT
  caldera repeat RUN/bundle --output again --run
"""


def differences(bundle: dict[str, Any]) -> Iterator[str]:
    """What is not as it was, a line each."""
    now = surroundings()
    for name in ("caldera", "git", "python", "platform"):
        if bundle[name] != now[name]:
            yield f"{name}: was {_shown(bundle[name])}, is {_shown(now[name])}"
    then, packages = bundle["packages"], now["packages"]
    for name in sorted(then.keys() | packages.keys()):
        if then.get(name) != packages.get(name):
            yield f"package {name}: was {_version(then, name)}, is {_version(packages, name)}"
    for key, files in bundle["files"].items():
        for path, print_then in files.items():
            if not Path(path).is_file():
                yield f"{key}: {path} is gone"
            elif fingerprint(Path(path)) != print_then:
                yield f"{key}: {path} has changed"


def command_of(bundle: dict[str, Any], output: str | None) -> list[str]:
    """The command; with an output, it writes there."""
    command = list(bundle["command"])
    if output is not None:
        command.append(f"{bundle['output_key']}={output}")
    return command


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return "unknown" if value is None else str(value)
    return f"{value['commit'][:12]}{' with changes' if value['is_changed'] else ''}"


def _version(packages: dict[str, str], name: str) -> str:
    return packages.get(name, "not there")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(
        prog="caldera repeat",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("bundle", type=Path, help="the bundle, or the folder of its run")
    made.add_argument("--output", help="where the repeated run writes to")
    made.add_argument("--run", action="store_true", help="run the command")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = parser().parse_args(argv)
    status: list[int] = []

    def work() -> None:
        bundle = read_bundle(arguments.bundle)
        changed = list(differences(bundle))
        for line in changed or ["nothing has changed"]:
            sys.stdout.write(f"{line}\n")
        command = command_of(bundle, arguments.output)
        directory = Path(bundle["directory"])
        sys.stdout.write(f"cd {shlex.quote(str(directory))}\n{shlex.join(command)}\n")
        sys.stdout.flush()
        if arguments.run:
            if not directory.is_dir():
                raise DataError(f"{directory}: the folder that the run was started in is gone")
            status.append(subprocess.run(command, cwd=directory).returncode)

    return run_entry_point(work) or (status[0] if status else 0)


if __name__ == "__main__":
    sys.exit(main())
