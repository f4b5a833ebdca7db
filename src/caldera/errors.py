"""The error model, whole.

    CalderaError                    everything that Caldera raises on purpose
    |- ConfigError (ValueError)     a mistake in the configuration: names the dotted key,
    |  |                            the value it got and the values it takes
    |  |- UnknownKeyError           a key that does not exist: names the nearest one
    |  `- UnsupportedError          a key or value that Caldera knows and cannot honour: says why
    |- DataError (ValueError)       a data file or row that cannot be used: names file, row, column
    |- ProtocolError (ValueError)   a DataProto operation whose inputs do not fit together
    |- RegistryError (KeyError)     an unknown or doubly registered name: lists the known ones
    |- RewardError (RuntimeError)   a scorer that raised or returned nonsense: names the sample
    |- RolloutError (RuntimeError)  a sampler that cannot serve a request
    |- CheckpointError (RuntimeError)  a checkpoint that is missing, incomplete or does not fit
    `- WorkerError (RuntimeError)   a worker that raised, died or fell silent: shows which, and
                                    what the other ranks were doing

There are three kinds of failure:

1. A mistake of the user's raises one of these. Entry points print its message alone, without a
   traceback, and exit with status 2; `CALDERA_TRACEBACK=1` shows the traceback as well.
2. An invariant of the program's own is an `assert`, and a failing one is a bug.
3. Whatever else goes wrong propagates with its traceback. Nothing is caught broadly.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CalderaError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ProtocolError",
    "RegistryError",
    "RewardError",
    "RolloutError",
    "UnknownKeyError",
    "UnsupportedError",
    "WorkerError",
    "nearest",
]


class CalderaError(Exception):
    """Base of every error that Caldera raises on purpose."""


class ConfigError(CalderaError, ValueError):
    """A configuration value that cannot be used."""


class UnknownKeyError(ConfigError):
    """A configuration key that does not exist."""


class UnsupportedError(ConfigError):
    """A configuration value that is understood and cannot be honoured."""


class DataError(CalderaError, ValueError):
    """A data file or row that cannot be used."""


class ProtocolError(CalderaError, ValueError):
    """A DataProto operation whose inputs do not fit together."""


class RegistryError(CalderaError, KeyError):
    """A name that a registry does not know, or knows already."""

    def __str__(self) -> str:  # KeyError would show the repr, with quotes around the sentence
        return str(self.args[0])


class RewardError(CalderaError, RuntimeError):
    """A score that could not be computed."""


class RolloutError(CalderaError, RuntimeError):
    """A request that a sampler cannot serve."""


class CheckpointError(CalderaError, RuntimeError):
    """A checkpoint that is missing, incomplete or does not fit."""


class WorkerError(CalderaError, RuntimeError):
    """A worker in another process that raised, died or fell silent."""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that a mistyped one most likely meant, at least so alike, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None
