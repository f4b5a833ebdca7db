"""`caldera doctor`: look at the machine, tell what works and how to mend the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.table import Table
from rich.text import Text

from caldera.commands.doctor.engines import (
    ENGINES,
    check_cuda,
    check_engine_python,
    check_engines,
    check_native,
)
from caldera.commands.doctor.machine import (
    check_disk,
    check_hub,
    check_ports,
    check_sandbox,
    check_shared_memory,
)
from caldera.commands.doctor.software import (
    WANTED,
    ask_each,
    check_cluster,
    check_libraries,
    check_python,
)
from caldera.tracking.progress import print_line, print_table

# ---- What the doctor has to say of one thing


class State(StrEnum):
    OK = "ok"
    ABSENT = "absent"
    """Not there, and nothing asks for it."""
    DOUBTFUL = "doubtful"
    """It works, but a run may come to its limits."""
    BROKEN = "broken"
    """Something that is needed, or was asked for, does not work."""


@dataclass(frozen=True)
class Finding:
    """One thing, how it is, and what to do about it."""

    name: str
    state: State
    told: str
    fix: str | None = None
    """A command to run, or a sentence; of all that is not well."""

    def __post_init__(self) -> None:
        assert self.state is State.OK or self.fix, "what is not well has a fix"


Check = Callable[[], Iterable[Finding]]


def ok(name: str, told: str) -> Finding:
    return Finding(name, State.OK, told)


def absent(name: str, told: str, fix: str) -> Finding:
    return Finding(name, State.ABSENT, told, fix)


def doubtful(name: str, told: str, fix: str) -> Finding:
    return Finding(name, State.DOUBTFUL, told, fix)


def broken(name: str, told: str, fix: str) -> Finding:
    return Finding(name, State.BROKEN, told, fix)


HELP = """\
Look at this machine: Python and libraries, CUDA and its driver, samplers, Ray,
Megatron, disk, shared memory, ports, the hub, the sandbox. Tells of each what
works, and of the rest how to mend it. Ends with status 1 if something that is
needed is broken; what is only absent or doubtful does not count.

  caldera doctor
  caldera doctor --engine-python /opt/vllm/bin/python
  caldera doctor --json
"""
TO_COMPUTE = ("torch", "transformers", "tensordict", "omegaconf", "hydra-core")
"""Libraries without which neither a GPU nor a sampler can be tried."""
MACHINE: tuple[Check, ...] = (
    check_cluster,
    check_disk,
    check_shared_memory,
    check_ports,
    check_hub,
    check_sandbox,
)
COLOURS = {State.OK: "green", State.ABSENT: "dim", State.DOUBTFUL: "yellow", State.BROKEN: "red"}


def parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    parser = argparse.ArgumentParser(
        prog="caldera doctor",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine-python",
        type=Path,
        metavar="PYTHON",
        help="look for vLLM and SGLang in this interpreter; one that is not there is a finding",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = parser().parse_args(sys.argv[1:] if argv is None else argv)
    findings = examine(arguments.engine_python)
    if arguments.json:
        told = [asdict(finding) for finding in findings]
        sys.stdout.write(json.dumps({"findings": told, "ok": not is_broken(findings)}) + "\n")
    else:
        show(findings)
    return int(is_broken(findings))


def examine(engine_python: Path | None) -> list[Finding]:
    """All that is found, in the order in which one thing needs another."""
    modules = {name: wanted.module for name, wanted in WANTED.items()}
    found = ask_each(sys.executable, modules | ENGINES)
    findings = [*check_python(), *check_libraries(found)]
    if not any(f.state is State.BROKEN for f in findings if f.name in TO_COMPUTE):
        findings += [*tried(check_cuda), *tried(check_native)]
    if engine_python is None:
        findings += check_engines(found)
    else:
        findings += check_engine_python(engine_python)
    for check in MACHINE:
        findings += tried(check)
    return findings


def tried(check: Check) -> list[Finding]:
    """What a check finds; one that cannot import or read what it needs has found just that."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except (ImportError, OSError) as error:
        name = getattr(check, "__name__", "").removeprefix("check_").replace("_", " ")
        first = (str(error).splitlines() or [""])[0]
        told = f"could not be looked at: {type(error).__name__}: {first}"
        findings.append(broken(name, told, "mend the libraries that are broken, and look again"))
    return findings


def is_broken(findings: Iterable[Finding]) -> bool:
    return any(finding.state is State.BROKEN for finding in findings)


def show(findings: Sequence[Finding]) -> None:
    """Print a table, then what to do about all that is not well, the broken first."""
    table = Table("what", "state", "found", show_lines=False)
    for finding in findings:
        told = Text(finding.state, style=COLOURS[finding.state])
        table.add_row(Text(finding.name), told, Text(finding.told))
    print_table(table)
    for state in (State.BROKEN, State.DOUBTFUL, State.ABSENT):
        for finding in findings:
            if finding.state is state:
                print_line(f"{finding.name} ({state}): {finding.fix}")
    broken = sum(finding.state is State.BROKEN for finding in findings)
    print_line("Nothing that is needed is broken." if not broken else f"{broken} broken.")


if __name__ == "__main__":
    sys.exit(main())
