"""The one way to plug something in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from caldera.errors import RegistryError
from caldera.registry import Registry


@pytest.fixture
def losses() -> Registry[Callable[[], str]]:
    registry: Registry[Callable[[], str]] = Registry("policy loss")

    @registry.register("vanilla")
    def vanilla() -> str:
        return "vanilla"

    @registry.register("clipped")
    def clipped() -> str:
        return "clipped"

    return registry


def test_what_was_registered_is_found(losses: Registry[Callable[[], str]]) -> None:
    assert losses["vanilla"]() == "vanilla"
    assert "clipped" in losses
    assert "other" not in losses
    assert losses.names() == list(losses) == ["clipped", "vanilla"]


def test_register_returns_the_thing_itself(losses: Registry[Callable[[], str]]) -> None:
    def thing() -> str:
        return ""

    assert losses.register("thing")(thing) is thing


def test_an_unknown_name_lists_the_known_ones(losses: Registry[Callable[[], str]]) -> None:
    with pytest.raises(RegistryError) as raised:
        losses["vanila"]
    assert str(raised.value) == (
        "unknown policy loss 'vanila'; did you mean 'vanilla'? (known: clipped, vanilla)"
    )
    with pytest.raises(KeyError, match=r"^unknown policy loss 'x' \(known: clipped, vanilla\)$"):
        losses["x"]


def test_a_name_belongs_to_one_thing(losses: Registry[Callable[[], str]]) -> None:
    vanilla = losses["vanilla"]
    losses.register("vanilla")(vanilla)
    with pytest.raises(RegistryError, match=r"^policy loss 'vanilla' is registered already$"):
        losses.register("vanilla")(losses["clipped"])
    assert losses["vanilla"] is vanilla


def test_one_thing_may_have_two_names(losses: Registry[Callable[[], str]]) -> None:
    losses.register("plain")(losses["vanilla"])
    assert losses["plain"] is losses["vanilla"]


def test_registries_are_apart(losses: Registry[Callable[[], str]]) -> None:
    other: Registry[int] = Registry("number")
    other.register("vanilla")(3)
    assert other["vanilla"] == 3
    assert losses["vanilla"]() == "vanilla"
