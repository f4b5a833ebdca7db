"""`caldera repeat BUNDLE`: what has changed since a run, and the command that repeats it."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caldera.errors import DataError
from caldera.trainer.bundle import (
    COMMAND_VARIABLE,
    UNREADABLE,
    Fingerprint,
    fingerprint,
    read_bundle,
    surroundings,
    variables,
)
from caldera.trainer.entry import OptionsCommand, text_parser
from caldera.trainer.secrets import is_masked

HELP = """\
Show the command of a run and what has changed since: versions, code, variables,
data, model. A run writes its bundle into its folder. With --run the command is
run, with the variables that it had.

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
    for name, (was, is_now) in changed_variables(bundle).items():
        yield f"variable {name}: was {_value(was)}, is {_value(is_now)}"
    yield from _changed_files(bundle["files"])


def _changed_files(keys: dict[str, dict[str, Fingerprint]]) -> Iterator[str]:
    for key, files in keys.items():
        for path, print_then in files.items():
            if UNREADABLE in print_then:
                yield f"{key}: {path} could not be read then: {print_then[UNREADABLE]}"
            elif not os.path.isfile(path):
                yield f"{key}: {path} is gone"
            elif fingerprint(Path(path)) != print_then:
                yield f"{key}: {path} has changed"


def changed_variables(bundle: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Variables that are not as they were: what they were, and are; None: not set."""
    then, now = bundle["environment"], variables(bundle["variables"])
    return {
        name: (then.get(name), now.get(name))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    }


def command_of(bundle: dict[str, Any], output: str | None) -> list[str]:
    """The command; with an output, it writes there."""
    command = list(bundle["command"])
    if output is not None:
        command.append(f"{bundle['output_key']}={output}")
    return command


def check_command(bundle: dict[str, Any]) -> None:
    """The command can be run as it is shown."""
    masked = [text for text in bundle["command"] if is_masked(text)]
    if masked:
        raise DataError(
            f"the command cannot be run as it is: bundles have no secrets. Put in what *** stands "
            f"for in {', '.join(masked)}, and run it by hand"
        )
    if bundle["nodes"] > 1:
        raise DataError(
            f"the run was started by torchrun on {bundle['nodes']} machines: start the command on "
            "each of them by hand, with the options that say where they meet"
        )
    if not Path(bundle["directory"]).is_dir():
        raise DataError(f"{bundle['directory']}: the folder that the run was started in is gone")


def environment_of(bundle: dict[str, Any]) -> dict[str, str]:
    """The variables to run the command with: those of now, with the run's own as they were."""
    environment = dict(os.environ)
    environment.pop(COMMAND_VARIABLE, None)
    for name, (was, _) in changed_variables(bundle).items():
        if was is None:
            environment.pop(name, None)
        elif not is_masked(was):
            environment[name] = was
    return environment


def _settings(bundle: dict[str, Any]) -> Iterator[str]:
    """The same for a shell."""
    for name, (was, _) in changed_variables(bundle).items():
        yield f"unset {name}" if was is None else f"export {name}={shlex.quote(was)}"


def _value(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return "unknown" if value is None else str(value)
    return f"{value['commit'][:12]}{' with changes' if value['is_changed'] else ''}"


def _version(packages: dict[str, str], name: str) -> str:
    return packages.get(name, "not there")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = text_parser("caldera repeat", HELP)
    made.add_argument("bundle", type=Path, help="the bundle, or the folder of its run")
    made.add_argument(
        "--output", metavar="FOLDER", help="where the repeated run writes to (where the first did)"
    )
    made.add_argument("--run", action="store_true", help="run the command")
    return made


def repeat(options: argparse.Namespace) -> int:
    """Tell what has changed, and run the command if that is asked for."""
    bundle = read_bundle(options.bundle)
    changed = list(differences(bundle))
    for line in changed or ["nothing has changed"]:
        sys.stdout.write(f"{line}\n")
    command = command_of(bundle, options.output)
    directory = bundle["directory"]
    lines = [f"cd {shlex.quote(directory)}", *_settings(bundle), shlex.join(command)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    if not options.run:
        return 0
    check_command(bundle)
    return subprocess.run(command, cwd=directory, env=environment_of(bundle)).returncode


REPEAT = OptionsCommand(parser, repeat)
main = REPEAT.main
