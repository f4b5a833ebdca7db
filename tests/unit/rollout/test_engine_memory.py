"""Engines that share a GPU, as far as it can be seen without one."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from caldera.rollout import ROLLOUTS
from caldera.rollout.engines.host.caldera_engine import sglang_engine


class Starting:
    """An engine that takes some time to start, and sees whether others do meanwhile."""

    lock = threading.Lock()
    starting = most = 0
    torch_version = ""

    def __init__(self, *_: Any) -> None:
        with self.lock:
            Starting.starting += 1
            Starting.most = max(Starting.most, Starting.starting)
        time.sleep(0.1)
        with self.lock:
            Starting.starting -= 1


def test_replicas_on_a_gpu_start_one_after_the_other(
    llama: torch.nn.Module, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caldera.rollout.engines.rollout.EngineProcess", Starting)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    asked = config(name="vllm", engine_python="python", data_parallel_size=3)
    ROLLOUTS["vllm"](asked, llama, torch.device("cuda"))
    assert (Starting.most, Starting.starting) == (1, 0)


@pytest.mark.parametrize("place", ["cuda", "path"])
def test_sglang_gives_back_what_came_from_a_gpu(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    freed: list[str] = []

    def read(_: Any) -> list[tuple[str, torch.Tensor]]:
        weight = torch.ones(3)
        kept.append(weakref.ref(weight))
        return [("w", weight)]

    def collect() -> None:
        assert kept[0]() is None, "nothing can be collected that is still in use"
        freed.append("handles")

    engine = SimpleNamespace(
        loop=None, update_weights_from_tensor=lambda weights, flush_cache: (True, "")
    )
    module: Any = ModuleType("sglang")
    module.Engine = lambda: engine
    monkeypatch.setitem(sys.modules, "sglang", module)
    monkeypatch.setattr(sglang_engine, "read_bucket", read)
    monkeypatch.setattr("torch.cuda.ipc_collect", collect)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append("memory"))
    sglang_engine.SGLangEngine({}).load_bucket({place: "somewhere"}, True)
    assert freed == (["handles", "memory"] if place == "cuda" else [])
