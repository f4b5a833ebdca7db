"""What becomes of requests to SGLang, with an SGLang of a few lines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.rollout.engines.host.caldera_engine.sglang_engine import SGLangEngine

PARAMS = {
    "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": False, "max_tokens": 3, "stop_token_ids": [],
}  # fmt: skip


class FakeEngine:
    """Answers 1 well; each other prompt goes wrong in its own way."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.aborted: list[str] = []
        self.tokenizer_manager = SimpleNamespace(
            rid_to_state={}, abort_request=self.aborted.append,
            flush_cache=self._flush,
        )  # fmt: skip

    def shutdown(self) -> None:
        self.loop.close()

    async def _flush(self, timeout_s: float) -> Any:
        return SimpleNamespace(success=timeout_s > 0)

    async def async_generate(self, input_ids: list[int], **others: Any) -> AsyncIterator[Any]:
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
