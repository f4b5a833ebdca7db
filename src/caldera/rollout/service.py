"""Sampling for asyncio: a thread steps the sampler, tasks await what they asked for."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from caldera.errors import CalderaError, RolloutError
from caldera.rollout.base import (
    Completion,
    OnFinished,
    OnToken,
    Piece,
    Request,
    Rollout,
    StepwiseRollout,
)

Action = Callable[[], object]
Answer = TypeVar("Answer")
NOT_TAKEN_IN = -1


class AsyncSampler:
    """Serves the requests of any number of tasks, of any event loops, all at the same time.

    A sampler that knows whole batches only is given all that waits, batch after batch. A caller
    changes weights pauses meanwhile: `await pause()`, `rollout.load_weights(...)`,
    `await resume()`. Requests in flight then go on with the new weights.

    An error of one request is raised where that is awaited. Any other error ends the sampler, and
    every task that waits hears of it.
    """

    def __init__(self, rollout: Rollout) -> None:
        """Nobody else may use the rollout, but for weights and sleep while paused."""
        self._engine: StepwiseRollout | _Batches = (
            rollout if isinstance(rollout, StepwiseRollout) else _Batches(rollout)
        )
        self._rollout = rollout
        self._inbox: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._ended: CalderaError | None = None
        self._lock = threading.Lock()  # over the two above: nothing is put in after the end
        # What follows is the thread's alone.
        self._waiting: dict[_Call, None] = {}  # not yet with the engine
        self._running: dict[int, _Call] = {}
        self._named: dict[str, _Call] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[Action]] = {}
        self._current: _Order | None = None
        self._paused = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="sampler", daemon=True)
        self._thread.start()

    # ---- for tasks

    async def generate(self, request: Request, name: str | None = None) -> Completion:
        """The completion of a request. Cancelling this aborts it; so does `abort(name)`, after
        which the completion is what there was, with the finish reason "abort"."""
        call = _Call(asyncio.get_running_loop(), request, name)
        self._order(call, partial(self._receive, call))
        try:
            return await call.future
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    async def stream(
        self, request: Request, name: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The same in pieces, as they are sampled; the last one brings the completion.

        Leaving the loop early aborts the request.
        """
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        call = _Call(asyncio.get_running_loop(), request, name, pieces)
        self._order(call, partial(self._receive, call))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield Piece([], [], await call.future)
        finally:
            if not call.future.done():
                self._give_up(call)

    async def abort(self, name: str | None = None) -> int:
        """End the request of that name, or all; returns how many there were."""
        return await self._ask(partial(self._abort, name))

    async def pause(self) -> None:
        """Return once no step is running; none runs until `resume`. Requests keep their state, and
        new ones wait."""
        await self._ask(partial(self._set_paused, True))

    async def resume(self) -> None:
        """Go on."""
        await self._ask(partial(self._set_paused, False))

    def check(self) -> None:
        """Raise what has ended the sampler, if something has."""
        with self._lock:
            if self._ended is not None:
                raise self._ended

    async def close(self) -> None:
        """End the thread. Waiting callers get an error."""
        if self._ended is None:
            await self._ask(self._close)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncSampler:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(self, act: Callable[[], int]) -> int:
        question: _Reply[int] = _Reply(asyncio.get_running_loop())
        self._order(question, lambda: self._post(question, partial(question.answer, act())))
        return await question.future

    def _order(self, reply: _Reply[Completion] | _Reply[int], act: Action) -> None:
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._inbox.put(_Order(reply, act))

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if self._ended is None:
                self._inbox.put(_Order(call, partial(self._end_call, call)))

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._obey(wait=not self._may_step())
                if self._may_step():
                    self._step_while_possible()
        except Exception as error:  # noqa: BLE001 -- every task that waits hears of it
            failure = RolloutError(f"the sampler failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
        else:
            self._end(RolloutError("the sampler is closed"))

    def _step_while_possible(self) -> None:
        with self._engine.stepping():
            while self._may_step():
                self._take_in()
                if self._engine.has_work():
                    self._engine.step()
                    self._tell_failures()
                self._send()
                self._carry_out(wait=False)
        self._send()  # a pause returns when no step is under way any more

    def _may_step(self) -> bool:
        if self._paused or self._closed:
            return False
        return bool(self._waiting) or self._engine.has_work()

    def _obey(self, wait: bool) -> None:
        """Carry out the orders that came in, and send results; with `wait`, at least one."""
        self._carry_out(wait)
        self._send()

    def _carry_out(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            self._current = self._inbox.get()
            self._current.act()
            wait, self._current = False, None

    def _receive(self, call: _Call) -> None:
        if call.name is not None:
            if call.name in self._named:
                error = RolloutError(f"a request named {call.name!r} is in flight already")
                self._post(call, partial(call.fail, error))
                return
            self._named[call.name] = call
        self._waiting[call] = None

    def _take_in(self) -> None:
        for call in self._waiting:
            on_token = None if call.pieces is None else self._on_token
            try:
                call.number = self._engine.add(call.request, on_token, self._on_finished)
            except CalderaError as error:
                self._named.pop(call.name or "", None)
                self._post(call, partial(call.fail, error))
            else:
                self._running[call.number] = call
        self._waiting.clear()

    def _on_token(self, number: int, token: int, log_prob: float) -> None:
        call = self._running[number]
        self._post(call, partial(call.tell, Piece([token], [log_prob])))

    def _on_finished(self, number: int, completion: Completion) -> None:
        call = self._running.pop(number)
        self._named.pop(call.name or "", None)
        self._post(call, partial(call.answer, completion))

    def _tell_failures(self) -> None:
        for number, error in self._engine.take_failures().items():
            call = self._running.pop(number, None)
            if call is not None:
                self._named.pop(call.name or "", None)
                self._post(call, partial(call.fail, error))

    def _end_call(self, call: _Call) -> bool:
        """Abort a call that has not ended; False if it has."""
        if call in self._waiting:
            del self._waiting[call]
            completion = Completion([], [], "abort", self._rollout.version)
        elif call.number in self._running:
            aborted = self._engine.abort(call.number)
            if aborted is None:  # it has ended with what was still on its way
                return False
            completion = aborted
            del self._running[call.number]
        else:
            return False
        self._named.pop(call.name or "", None)
        self._post(call, partial(call.answer, completion))
        return True

    def _abort(self, name: str | None) -> int:
        everyone = [*self._waiting, *self._running.values()]
        chosen = everyone if name is None else [c for c in everyone if c.name == name]
        return sum([self._end_call(call) for call in chosen])

    def _set_paused(self, paused: bool) -> int:
        self._paused = paused
        return 0

    def _close(self) -> int:
        self._closed = True
        return 0

    def _end(self, error: CalderaError) -> None:
        with self._lock:
            self._ended = error
            orders = [self._inbox.get() for _ in range(self._inbox.qsize())]
        late = [order.reply for order in (self._current, *orders) if order is not None]
        for reply in [*late, *self._waiting, *self._running.values()]:
            self._post(reply, partial(reply.fail, error))
        self._send()

    def _post(self, reply: _Reply[Completion] | _Reply[int], act: Action) -> None:
        self._outbox.setdefault(reply.loop, []).append(act)

    def _send(self) -> None:
        """Hand over what was posted: an event loop is woken up once, however much it is."""
        for loop, actions in self._outbox.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_all_of, actions)
        self._outbox = {}


def _all_of(actions: list[Action]) -> None:
    for act in actions:
        act()


class _Reply(Generic[Answer]):
    """A call that a task awaits. All but `loop` belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[Answer] = loop.create_future()

    def answer(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Call(_Reply[Completion]):
    """A request of a task's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        request: Request,
        name: str | None,
        pieces: asyncio.Queue[Piece | None] | None = None,
    ) -> None:
        """`pieces` is where they go as they are sampled, and None after the last."""
        super().__init__(loop)
        self.request = request
        self.name = name
        self.pieces = pieces
        self.number = NOT_TAKEN_IN

    def tell(self, piece: Piece | None) -> None:
        if self.pieces is not None:
            self.pieces.put_nowait(piece)

    def answer(self, answer: Completion) -> None:
        super().answer(answer)
        self.tell(None)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.tell(None)


@dataclass(frozen=True)
class _Order:
    """An order for the thread, and the receiver of its failure."""

    reply: _Reply[Completion] | _Reply[int]
    act: Action


class _Batches:
    """A sampler of whole batches, with the methods of a `StepwiseRollout` that the thread needs: a
    step serves all that waits."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Request, OnToken | None, OnFinished | None]] = {}

    def add(
        self, request: Request, on_token: OnToken | None, on_finished: OnFinished | None
    ) -> int:
        self._rollout.check([request])
        number = next(self._numbers)
        self._waiting[number] = (request, on_token, on_finished)
        return number

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        batch = list(self._waiting.items())
        self._waiting = {}

        def finish(index: int, completion: Completion) -> None:
            number, (_, on_token, on_finished) = batch[index]
            if on_token is not None:
                for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True):
                    on_token(number, token, log_prob)
            if on_finished is not None:
                on_finished(number, completion)

        self._rollout.generate([request for _, (request, _, _) in batch], finish)

    def abort(self, number: int) -> Completion | None:
        if self._waiting.pop(number, None) is None:
            return None
        return Completion([], [], "abort", self._rollout.version)

    def take_failures(self) -> dict[int, CalderaError]:
        return {}

    def has_work(self) -> bool:
        return bool(self._waiting)
