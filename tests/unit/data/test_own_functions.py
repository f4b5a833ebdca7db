"""A name that is registered, or a function in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from caldera.data import registered_or_own
from caldera.errors import ConfigError, RegistryError
from caldera.registry import Registry


@pytest.fixture
def registry() -> Registry[Callable[[], int]]:
    made: Registry[Callable[[], int]] = Registry("some.key")
    made.register("one")(lambda: 1)
    return made


def test_a_registered_name(registry: Registry[Callable[[], int]]) -> None:
    assert registered_or_own(registry, "one")() == 1


def test_a_function_in_a_file_is_registered(
    registry: Registry[Callable[[], int]], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def two():\n    return 2\n")
    name = f"{file}:two"
    assert registered_or_own(registry, name)() == 2
    assert registry[name] is registered_or_own(registry, name)


def test_a_function_of_a_package(registry: Registry[Callable[[], int]]) -> None:
    assert callable(registered_or_own(registry, "pkg://caldera.registry:Registry"))


def test_mistakes(registry: Registry[Callable[[], int]], tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"unknown some\.key 'onne'; did you mean 'one'"):
        registered_or_own(registry, "onne")
    with pytest.raises(ConfigError, match=r"some\.key: .*nothing\.py does not exist"):
        registered_or_own(registry, f"{tmp_path}/nothing.py:two")
    (tmp_path / "mine.py").write_text("def two():\n    return 2\n")
    with pytest.raises(ConfigError, match=r"some\.key: .* has no 'too' \(did you mean 'two'\?\)"):
        registered_or_own(registry, f"{tmp_path}/mine.py:too")
