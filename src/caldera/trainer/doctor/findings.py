"""What the doctor has to say of one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


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
