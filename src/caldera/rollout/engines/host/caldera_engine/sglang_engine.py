"""SGLang: its event loop runs while a step is waited for."""

from __future__ import annotations

import asyncio
from typing import Any

from .base import Event
from .buckets import Adapter, Bucket, read_bucket

SECONDS_OF_A_STEP = 0.05
"""How long a step waits at most, so that the caller can do something else between."""
SECONDS_TO_BE_IDLE = 60.0
PROBE = "probe"


class SGLangEngine:
    """SGLang's Engine, whose scheduler is a separate process; see `InferenceEngine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of SGLang's Engine."""
        import sglang

        self._engine = sglang.Engine(**arguments)
        self._can_sleep = bool(arguments.get("enable_memory_saver"))
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: list[Event] = []
        self._told = asyncio.Event()
        self._version = 0

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
        """`adapter` is None: SGLang gets weights in which it is merged."""
        # SGLang reports the end of an aborted request a moment before it is rid of it.
        flushed = self._engine.tokenizer_manager.flush_cache(timeout_s=SECONDS_TO_BE_IDLE)
        if not self._loop.run_until_complete(flushed).success:
            raise RuntimeError("SGLang does not drop what it has cached with other weights")
        self._version = version

    def score(self, prompt_ids: list[int]) -> list[float]:
        told = self._loop.run_until_complete(
            self._engine.async_generate(
                input_ids=prompt_ids,
                sampling_params={"max_new_tokens": 1, "temperature": 1.0},
                return_logprob=True,
                logprob_start_len=0,
                rid=PROBE,
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
