"""Many tasks, one sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PreTrainedModel

from caldera.errors import RolloutError
from caldera.rollout import ROLLOUTS, AsyncSampler, Completion, NativeRollout, Request

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "hf"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def rollout(llama: PreTrainedModel, config: MakeConfig) -> Any:
    return NativeRollout(config(), llama, CPU)


def tokens(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def serve(rollout: Any, work: Any) -> Any:
    """Run `work(sampler)` in an event loop of its own."""

    async def main() -> Any:
        async with AsyncSampler(rollout) as sampler:
            return await asyncio.wait_for(work(sampler), timeout=30)

    return asyncio.run(main())


def test_many_tasks_get_what_a_batch_gets(
    name: str, llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([5, 9, 20, 33, 4, 16], temperature=0.0)
    rollout = ROLLOUTS[name](config(), llama, CPU)
    expected = rollout.generate(requests)

    async def work(sampler: Any) -> Any:
        return await asyncio.gather(*(sampler.generate(request) for request in requests))

    assert tokens(serve(rollout, work)) == tokens(expected)


def test_a_stream_has_the_tokens_and_then_the_whole(
    name: str, llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    request = make_requests([5], temperature=0.0)[0]
    rollout = ROLLOUTS[name](config(), llama, CPU)

    async def work(sampler: Any) -> list[Any]:
        return [piece async for piece in sampler.stream(request)]

    *pieces, last = serve(rollout, work)
    assert isinstance(last.completion, Completion) and last.token_ids == []
    assert [t for piece in pieces for t in piece.token_ids] == last.completion.token_ids
    assert [p for piece in pieces for p in piece.log_probs] == last.completion.log_probs
    assert last.completion.token_ids == rollout.generate([request])[0].token_ids


def test_pieces_come_while_others_are_still_sampled(
    rollout: Any, make_requests: MakeRequests
) -> None:
    request = make_requests([5], max_tokens=40)[0]

    async def work(sampler: Any) -> tuple[Any, ...]:
        stream = sampler.stream(request)
        await anext(stream)
        other = await sampler.generate(replace(request, seed=9))
        rest = [piece async for piece in stream]
        return other, rest

    other, rest = serve(rollout, work)
    assert len(other.token_ids) == 40 and len(rest) == 40
    assert rest[-1].completion.finish_reason == "length"


def test_thousands_of_tasks(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = [
        Request([1 + seed % 40, 3], make_requests([1], max_tokens=2)[0].params, seed)
        for seed in range(3000)
    ]
    rollout = NativeRollout(config(max_num_seqs=512), llama, CPU)

    async def work(sampler: Any) -> Any:
        return await asyncio.gather(*(sampler.generate(request) for request in requests))

    assert all(len(completion.token_ids) == 2 for completion in serve(rollout, work))


def test_abort_by_name_gives_the_caller_what_there_was(
    rollout: Any, make_requests: MakeRequests
) -> None:
    request = make_requests([5], max_tokens=50)[0]
    whole = rollout.generate([request])[0]

    async def work(sampler: Any) -> tuple[Any, ...]:
        stream = sampler.stream(request, name="a")
        other = asyncio.create_task(sampler.generate(request, name="b"))
        first = [await anext(stream) for _ in range(3)]
        with pytest.raises(RolloutError, match="'b' is in flight"):
            await sampler.generate(request, name="b")
        assert await sampler.abort("c") == 0
        assert await sampler.abort("a") == 1
        *pieces, last = [piece async for piece in stream]
        return first + pieces, last.completion, await other

    pieces, aborted, other = serve(rollout, work)
    assert aborted.finish_reason == "abort" and 3 <= len(aborted.token_ids) < 50
    assert aborted.token_ids == whole.token_ids[: len(aborted.token_ids)]
    assert [t for piece in pieces for t in piece.token_ids] == aborted.token_ids
    assert other.token_ids == whole.token_ids


def test_abort_of_all_while_paused(
    name: str, llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([5, 6], max_tokens=3)
    rollout = ROLLOUTS[name](config(), llama, CPU)

    async def work(sampler: Any) -> tuple[Any, ...]:
        await sampler.pause()
        tasks = [asyncio.create_task(sampler.generate(request)) for request in requests]
        await asyncio.sleep(0)
        aborted = await sampler.abort()
        return aborted, await asyncio.gather(*tasks)

    assert serve(rollout, work) == (2, [Completion([], [], "abort", 0)] * 2)


def test_cancelling_a_task_aborts_its_request(rollout: Any, make_requests: MakeRequests) -> None:
    request, other = make_requests([5, 6], max_tokens=59)

    async def work(sampler: Any) -> tuple[Any, ...]:
        task = asyncio.create_task(sampler.generate(request))
        stream = sampler.stream(request)
        await anext(stream)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        await sampler.pause()
        in_flight = rollout.has_work()
        await sampler.resume()
        return in_flight, await sampler.generate(other)

    in_flight, completion = serve(rollout, work)
    assert not in_flight
    assert completion.finish_reason == "length"


def test_weights_change_while_paused(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    request = make_requests([5], max_tokens=50, temperature=0.0)[0]
    rollout = NativeRollout(config(), build_model(seed=0), CPU)
    other = build_model(seed=1)

    async def work(sampler: Any) -> tuple[Any, ...]:
        stream = sampler.stream(request)
        for _ in range(3):
            await anext(stream)
        await sampler.pause()
        waiting = asyncio.create_task(sampler.generate(request))
        rollout.sleep()
        rollout.load_weights(other.state_dict().items(), version=5)
        rollout.wake_up()
        await sampler.resume()
        *_, last = [piece async for piece in stream]
        return last.completion, await waiting

    interrupted, later = serve(rollout, work)
    (old, before), (new, after) = interrupted.weight_versions
    assert (old, new, before + after) == (0, 5, 50) and before >= 3
    assert later.weight_versions == ((5, 50),)
    expected = NativeRollout(config(), other, CPU).generate([request])[0]
    assert later.token_ids == expected.token_ids


def test_a_bad_request_is_its_callers_alone(
    name: str, llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    good, bad = make_requests([5, 60], max_tokens=60)
    rollout = ROLLOUTS[name](config(max_model_len=100), llama, CPU)

    async def work(sampler: Any) -> list[Any]:
        results = await asyncio.gather(
            sampler.generate(good), sampler.generate(bad), return_exceptions=True
        )
        return [*results, await sampler.generate(good)]

    first, error, again = serve(rollout, work)
    assert first.token_ids == again.token_ids
    assert isinstance(error, RolloutError) and "max_model_len=100" in str(error)


def test_a_failure_reaches_every_caller(
    name: str,
    llama: PreTrainedModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = make_requests([5, 6, 7])
    rollout = ROLLOUTS[name](config(), llama, CPU)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(rollout, "sampling_mode", fail)

    async def work(sampler: Any) -> Any:
        calls = [sampler.generate(request) for request in requests]
        stream = sampler.stream(requests[0])
        calls.append(anext(stream))
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RolloutError, match="of all things"):
            await sampler.generate(requests[0])
        return results

    for error in serve(rollout, work):
        assert isinstance(error, RolloutError)
        assert str(error) == "the sampler failed: ZeroDivisionError: of all things"
        assert isinstance(error.__cause__, ZeroDivisionError)


def test_close_ends_what_is_in_flight(rollout: Any, make_requests: MakeRequests) -> None:
    request = make_requests([5], max_tokens=59)[0]

    async def main() -> None:
        sampler = AsyncSampler(rollout)
        await sampler.pause()
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(0)
        await sampler.close()
        with pytest.raises(RolloutError, match="closed"):
            await task
        with pytest.raises(RolloutError, match="closed"):
            await sampler.generate(request)
        await sampler.close()

    asyncio.run(main())
