"""The error tree: what each error is, for code that catches it."""

from __future__ import annotations

import pickle

import pytest

from caldera import errors
from caldera.errors import (
    CalderaError,
    CheckpointError,
    ConfigError,
    DataError,
    ProtocolError,
    RegistryError,
    RewardError,
    RolloutError,
    UnknownKeyError,
    UnsupportedError,
    WorkerError,
    nearest,
)

BASES: dict[type[CalderaError], type[Exception]] = {
    ConfigError: ValueError,
    UnknownKeyError: ConfigError,
    UnsupportedError: ConfigError,
    DataError: ValueError,
    ProtocolError: ValueError,
    RegistryError: KeyError,
    RewardError: RuntimeError,
    RolloutError: RuntimeError,
    CheckpointError: RuntimeError,
    WorkerError: RuntimeError,
}


def test_the_tree_is_whole() -> None:
    named = {getattr(errors, name) for name in errors.__all__}
    assert named == {*BASES, CalderaError, nearest}


@pytest.mark.parametrize(("error", "base"), BASES.items())
def test_every_error_is_also_one_of_pythons(error: type[CalderaError], base: type) -> None:
    assert issubclass(error, CalderaError)
    assert issubclass(error, base)
    message = "key='value': takes other values"
    assert str(error(message)) == message
    again = pickle.loads(pickle.dumps(error(message)))
    assert type(again) is error
    assert str(again) == message


def test_the_docstring_draws_the_tree() -> None:
    assert errors.__doc__ is not None
    assert all(error.__name__ in errors.__doc__ for error in BASES)


def test_nearest() -> None:
    known = ["clip_ratio", "clip_ratio_low", "grad_clip"]
    assert nearest("clip_ration", known) == "clip_ratio"
    assert nearest("grad_cilp", iter(known)) == "grad_clip"
    assert nearest("temperature", known) is None
    assert nearest("anything", []) is None
