"""Bringing models to the device, and measuring its use."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from caldera.models.flops import Arithmetic
from caldera.protocol import DataProto
from caldera.workers import phases
from caldera.workers.phases import mfu_timer, on_device


class Recorder:
    """Stands for an engine: notes when it is moved."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def onload(self, optimizer: bool = False) -> None:
        self.log.append(f"{self.name} on{' with optimiser' if optimizer else ''}")

    def offload(self) -> None:
        self.log.append(f"{self.name} off")


def test_models_are_on_the_device_meanwhile() -> None:
    log: list[str] = []
    actor, reference = Recorder("actor", log), Recorder("reference", log)
    with on_device(actor, reference, optimizer=True):  # type: ignore[arg-type]
        log.append("work")
    with on_device(actor, None):  # type: ignore[arg-type]
        pass
    assert log == [
        "actor on with optimiser",
        "reference on",
        "work",
        "actor off",
        "reference off",
        "actor on",
        "actor off",
    ]


def engine_of(model: PreTrainedModel) -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"), arithmetic=Arithmetic.of(model), model_parallel_size=1
    )


@pytest.fixture
def data() -> DataProto:
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return DataProto.from_dict({"attention_mask": attention, "response_mask": attention[:, 2:]})


def test_on_a_cpu_there_is_no_such_metric(
    tiny_model: Callable[..., PreTrainedModel], data: DataProto
) -> None:
    with mfu_timer("actor", engine_of(tiny_model()), data, epochs=1) as metrics:
        pass
    assert metrics == {}


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_needed_over_promised(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[..., PreTrainedModel],
    data: DataProto,
    epochs: int,
) -> None:
    """As on a GPU that promises a million operations a second, after half a second's work."""
    clock = iter([10.0, 10.5])
    synchronised: list[torch.device] = []
    monkeypatch.setattr(phases, "promised_flops", lambda device: 1e6)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronised.append)
    model = tiny_model()
    with mfu_timer("actor", engine_of(model), data, epochs) as metrics:
        assert metrics == {}
    assert synchronised == [torch.device("cpu")]
    forward = Arithmetic.of(model).flops([4, 3], head_tokens=4, training=False)
    assert forward is not None
    passes = 3 * epochs if epochs else 1
    assert metrics == {"perf/mfu/actor": pytest.approx(passes * forward / 0.5 / 1e6)}
