"""SGLang: its event loop runs while a step is waited for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from .base import Event
from .buckets import ADAPTER_FILE, Adapter, Bucket, check_adapter, read_bucket

SECONDS_OF_A_STEP = 0.05
"""How long a step waits at most, so that the caller can do something else between."""
SECONDS_TO_BE_IDLE = 60.0
PROBE = "probe"


class SGLangEngine:
    """SGLang's Engine, whose scheduler is a separate process; see `InferenceEngine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of SGLang's Engine."""
        self._engine = _engine_class(arguments)(**arguments)
        self._can_sleep = bool(arguments.get("enable_memory_saver"))
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: list[Event] = []
        self._told = asyncio.Event()
        self._version = 0
        self._adapters = 0  # how many there were
        self._adapter: str | None = None

    def add(self, number: int, prompt_ids: list[int], params: dict[str, Any], seed: int) -> None:
        """SGLang draws from one random stream: the seed is not the request's own."""
        self._tasks[number] = self._loop.create_task(self._follow(number, prompt_ids, params))

    def abort(self, number: int) -> None:
        """The request ends in the scheduler, too, before anything else is done."""
        task = self._tasks.pop(number, None)
        if task is None:
            return
        manager = self._engine.tokenizer_manager
        state = manager.rid_to_state.get(str(number))
        if state is not None and getattr(state, "dispatched", True):
            manager.abort_request(str(number))
        else:  # the scheduler does not know it yet, and would run it to its end
            task.cancel()
        self._loop.run_until_complete(asyncio.wait([task]))

    def has_work(self) -> bool:
        return bool(self._tasks)

    def step(self) -> list[Event]:
        self._loop.run_until_complete(self._wait())
        events, self._events = self._events, []
        return events

    def load_bucket(self, bucket: Bucket, first: bool) -> None:
        # Copies, since memory of a mapped file cannot be handed on to the scheduler. What comes
        # from a GPU is one already.
        weights = [
            (name, weight if weight.is_cuda else weight.clone())
            for name, weight in read_bucket(bucket)
        ]
        done, told = self._engine.update_weights_from_tensor(weights, flush_cache=False)[:2]
        if not done:
            raise RuntimeError(f"SGLang does not take the weights: {told}")
        if "cuda" in bucket:
            _give_back(weights)

    def use_weights(self, version: int, adapter: Adapter | None) -> None:
        # SGLang reports the end of an aborted request a moment before it is rid of it.
        flushed = self._engine.tokenizer_manager.flush_cache(timeout_s=SECONDS_TO_BE_IDLE)
        if not self._loop.run_until_complete(flushed).success:
            raise RuntimeError("SGLang does not drop what it has cached with other weights")
        if self._adapter is not None:
            before, self._adapter = self._adapter, None
            self._loop.run_until_complete(self._unload(before))
        if adapter is not None:
            self._adapter = self._load_adapter(adapter)
        self._version = version

    def _load_adapter(self, adapter: Adapter) -> str:
        """As tensors: from a folder SGLang reads with the format of the model's weights, and those
        are dummies. Returns the name that requests are to give."""
        from safetensors.torch import load_file

        check_adapter(adapter)
        self._adapters += 1
        name, folder = f"adapter-{self._adapters}", Path(adapter["path"])
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        told = self._engine.load_lora_adapter_from_tensors(
            name, load_file(folder / ADAPTER_FILE), settings
        )
        if not told.success:
            raise RuntimeError(f"SGLang does not take the adapter: {told.error_message}")
        return name

    async def _unload(self, name: str) -> None:
        """No request is left. SGLang's own way waits for those that it counts, and it goes on
        counting the ones that were aborted before they had begun."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        manager = self._engine.tokenizer_manager
        known_as = await manager.lora_registry.unregister(name)
        order = UnloadLoRAAdapterReqInput(lora_name=name, lora_id=known_as)
        for told in await manager.update_lora_adapter_communicator(order):
            if not told.success:
                raise RuntimeError(f"SGLang does not drop an adapter: {told.error_message}")

    def score(self, prompt_ids: list[int]) -> list[float]:
        told = self._loop.run_until_complete(
            self._engine.async_generate(
                input_ids=prompt_ids,
                sampling_params={"max_new_tokens": 1, "temperature": 1.0},
                return_logprob=True,
                logprob_start_len=0,
                rid=PROBE,
                lora_path=self._adapter,
            )
        )
        return _of_prompt(told["meta_info"])

    def sleep(self) -> bool:
        if self._can_sleep:
            self._engine.release_memory_occupation()
        return self._can_sleep

    def wake_up(self, part: str | None) -> None:
        if self._can_sleep:
            self._engine.resume_memory_occupation(tags=None if part is None else [part])

    def close(self) -> None:
        self._engine.shutdown()

    async def _wait(self) -> None:
        if not self._events:
            self._told.clear()
            try:
                await asyncio.wait_for(self._told.wait(), SECONDS_OF_A_STEP)
            except TimeoutError:
                return

    async def _follow(self, number: int, prompt_ids: list[int], params: dict[str, Any]) -> None:
        """Tell of a request until it ends."""
        wants_prompt = bool(params.get("prompt_logprobs"))
        known = 0
        why = "SGLang returns nothing more of it"  # which is no news of one that has ended
        try:
            stream = await self._engine.async_generate(
                input_ids=prompt_ids,
                sampling_params=_sampling_params(params),
                return_logprob=True,
                logprob_start_len=0 if wants_prompt else -1,
                top_logprobs_num=params.get("logprobs", 0),
                stream=True,
                rid=str(number),
                lora_path=self._adapter,
            )
            async for told in stream:
                event = self._event(number, told["meta_info"], known, wants_prompt)
                known += len(event.token_ids)
                self._tell(event)
                wants_prompt = False
        except Exception as error:  # noqa: BLE001 -- of this request: the others go on
            why = f"{type(error).__name__}: {error}"
        self._tell(Event(number, [], [], self._version, "error", error=why))

    def _event(self, number: int, meta: dict[str, Any], known: int, wants_prompt: bool) -> Event:
        """The new tokens: SGLang repeats all from the beginning, again and again."""
        sampled = meta["output_token_logprobs"][known:]
        ranks = (meta.get("output_top_logprobs") or [])[known:]
        reason = meta["finish_reason"]
        return Event(
            number,
            [int(token) for _, token, _ in sampled],
            [float(log_prob) for log_prob, _, _ in sampled],
            self._version,
            None if reason is None else reason["type"],
            [[(int(token), float(value)) for value, token, _ in rank or []] for rank in ranks],
            _of_prompt(meta) if wants_prompt else None,
            None if reason is None else reason.get("message"),
        )

    def _tell(self, event: Event) -> None:
        if event.number not in self._tasks:  # aborted
            return
        if event.finish_reason is not None:
            del self._tasks[event.number]
        self._events.append(event)
        self._told.set()


def _engine_class(arguments: dict[str, Any]) -> Any:
    import sglang

    if not arguments.get("enable_lora") or arguments.get("device") != "cpu":
        return sglang.Engine
    from sglang.srt.entrypoints.engine import Engine

    return type("Engine", (Engine,), {"run_scheduler_process_func": staticmethod(run_unpinned)})


def run_unpinned(*arguments: Any, **named: Any) -> None:
    """SGLang's scheduler, in a separate process that pins no memory: SGLang's layers with
    adapters ask for that on a CPU, too, where torch refuses."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process

    library: Any = torch
    library.tensor, library.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
    library.Tensor.pin_memory = lambda tensor, *_: tensor
    run_scheduler_process(*arguments, **named)


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        return make(*arguments, **named)

    return made


def _give_back(weights: list[tuple[str, Any]]) -> None:
    """Free copies on a GPU that the scheduler has read: the cache needs the memory."""
    import torch

    weights.clear()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _of_prompt(meta: dict[str, Any]) -> list[float]:
    return [float(log_prob) for log_prob, _, _ in meta["input_token_logprobs"][1:]]


def _sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    same = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "ignore_eos",
    )
    return {
        **{name: params[name] for name in same},
        "max_new_tokens": params["max_tokens"],
        "stop_token_ids": list(params["stop_token_ids"]),
        "no_stop_trim": True,
    }
