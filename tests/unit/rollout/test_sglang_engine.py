"""What becomes of requests to SGLang, with an SGLang of a few lines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.rollout.engines.host.caldera_engine.sglang_engine import SGLangEngine, run_unpinned
from caldera.rollout.engines.weights import AdapterFolders, AdapterShape

PARAMS = {
    "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": False, "max_tokens": 3, "stop_token_ids": [],
}  # fmt: skip


class FakeEngine:
    """Answers 1 well; each other prompt goes wrong in its own way."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.aborted: list[str] = []
        self.adapters: dict[str, Any] = {}
        self.named: list[str | None] = []
        self.tokenizer_manager = SimpleNamespace(
            rid_to_state={}, abort_request=self.aborted.append,
            flush_cache=self._flush, lora_registry=self,
            update_lora_adapter_communicator=self._unload,
        )  # fmt: skip

    def shutdown(self) -> None:
        self.loop.close()

    async def _flush(self, timeout_s: float) -> Any:
        return SimpleNamespace(success=timeout_s > 0)

    def load_lora_adapter_from_tensors(self, name: str, tensors: Any, settings: Any) -> Any:
        told = SimpleNamespace(success=settings["r"] == 2, error_message="another rank")
        if told.success:
            self.adapters[name] = tensors
        return told

    async def unregister(self, name: str) -> str:
        return f"number of {name}"

    async def _unload(self, order: Any) -> list[Any]:
        assert order.lora_id == f"number of {order.lora_name}"
        del self.adapters[order.lora_name]
        return [SimpleNamespace(success=True)]

    async def async_generate(self, input_ids: list[int], **others: Any) -> AsyncIterator[Any]:
        self.named.append(others["lora_path"])
        return self._answer(input_ids[0])

    async def _answer(self, prompt: int) -> AsyncIterator[Any]:
        if prompt == 2:
            raise RuntimeError("broken")
        if prompt == 3:
            return
        if prompt == 4:
            await asyncio.sleep(3600)
        ends = {"type": "abort", "message": "no room"} if prompt == 5 else {"type": "length"}
        yield {"meta_info": {"output_token_logprobs": [(-0.5, 7, None)], "finish_reason": ends}}


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLangEngine]:
    install(monkeypatch, "sglang", Engine=FakeEngine)
    made = SGLangEngine({})
    yield made
    made.close()


def test_requests_fail_alone(engine: SGLangEngine) -> None:
    for prompt in (1, 2, 3, 5):
        engine.add(prompt, [prompt], PARAMS, 0)
    events: dict[int, Event] = {}
    while engine.has_work():
        events |= {event.number: event for event in engine.step()}
    told = {number: (event.finish_reason, event.error) for number, event in events.items()}
    assert told == {
        1: ("length", None),
        2: ("error", "RuntimeError: broken"),
        3: ("error", "SGLang returns nothing more of it"),
        5: ("abort", "no room"),
    }


def test_a_request_that_has_not_begun_is_aborted_at_once(engine: SGLangEngine) -> None:
    engine.add(4, [4], PARAMS, 0)
    engine.step()
    engine.abort(4)
    assert not engine.has_work() and engine._engine.aborted == []


def test_requests_name_the_newest_adapter(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = engine._engine
    install(monkeypatch, "sglang.srt.managers.io_struct", UnloadLoRAAdapterReqInput=SimpleNamespace)
    for name in ("sglang.srt", "sglang.srt.managers"):
        install(monkeypatch, name)
    folders = AdapterFolders("sglang", AdapterShape(2, ["q_proj"], {"r": 2}), tmp_path)
    for version in (1, 2):
        folders.write({"w": torch.full((2, 2), float(version))})
        engine.use_weights(version, folders.newest)
        assert [float(loaded["w"][0, 0]) for loaded in fake.adapters.values()] == [version]
        engine.add(version, [1], PARAMS, 0)
        while engine.has_work():
            assert {event.version for event in engine.step()} <= {version}
    engine.use_weights(3, None)
    engine.add(3, [1], PARAMS, 0)
    engine.step()
    assert fake.named == ["adapter-1", "adapter-2", None] and not fake.adapters
    other = AdapterFolders("sglang", AdapterShape(4, ["q_proj"], {"r": 4}), tmp_path)
    other.write({"w": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match="another rank"):
        engine.use_weights(4, other.newest)


def test_a_scheduler_on_a_cpu_pins_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torch, "tensor"), (torch, "zeros"), (torch.Tensor, "pin_memory")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    made: list[torch.Tensor] = []

    def run(size: int, *, kind: torch.dtype) -> None:
        made.append(torch.tensor([size], dtype=kind, pin_memory=True).pin_memory())
        made.append(torch.zeros((size,), dtype=kind, pin_memory=True))

    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        install(monkeypatch, name)
    install(monkeypatch, "sglang.srt.managers.scheduler", run_scheduler_process=run)
    run_unpinned(2, kind=torch.int32)
    assert [each.tolist() for each in made] == [[2], [0, 0]]
    assert {each.dtype for each in made} == {torch.int32}
