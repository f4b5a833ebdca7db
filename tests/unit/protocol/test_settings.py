from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from caldera.errors import ConfigError
from caldera.protocol import DataProto, DataProtoConfig
from caldera.protocol.serialization import serialization_method


@pytest.fixture(autouse=True)
def follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VERL_AUTO_PADDING", raising=False)
    yield
    DataProtoConfig.auto_padding = None


@pytest.mark.parametrize(
    ("value", "enabled"), [("TRUE", True), ("true", True), ("1", True), ("0", False), ("", False)]
)
def test_auto_padding_variable(monkeypatch: pytest.MonkeyPatch, value: str, enabled: bool) -> None:
    monkeypatch.setenv("VERL_AUTO_PADDING", value)
    assert DataProtoConfig.auto_padding is enabled
    assert DataProto().is_padding_enabled() is enabled


def test_assignment_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    DataProtoConfig.auto_padding = False
    assert not DataProto().is_padding_enabled()
    DataProtoConfig.auto_padding = None
    assert DataProto().is_padding_enabled()


def test_auto_padding_of_one_dataproto() -> None:
    tensors = {"x": torch.zeros(5)}
    assert not DataProto.from_dict(tensors).is_padding_enabled()
    padded = DataProto.from_dict(tensors, auto_padding=True)
    assert padded.meta_info == {"_verl_auto_padding": True}
    assert padded.is_padding_enabled()
    assert DataProto.from_single_dict(tensors, auto_padding=True).is_padding_enabled()
    assert [len(part) for part in padded.chunk(3)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("value", "method"), [("", "torch"), ("torch", "torch"), ("numpy", "numpy")]
)
def test_serialization_variable(monkeypatch: pytest.MonkeyPatch, value: str, method: str) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", value)
    assert serialization_method() == method


def test_unknown_serialization_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", "arrow")
    with pytest.raises(ConfigError, match=r"METHOD='arrow' .*known: torch, numpy"):
        serialization_method()
