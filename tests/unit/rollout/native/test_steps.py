"""Requests that come, go and are changed under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PreTrainedModel

from caldera.errors import RolloutError
from caldera.rollout import Completion, NativeRollout

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")


def run(rollout: Any) -> None:
    with rollout.stepping():
        while rollout.has_work():
            rollout.step()


def tokens(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture
def finished() -> dict[str, Any]:
    return {}


def test_requests_that_come_later_are_served_the_same(
    llama: PreTrainedModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    finished: dict[int, Completion],
) -> None:
    requests = make_requests([5, 20, 33, 2, 16], max_tokens=25)
    expected = NativeRollout(config(), llama, CPU).generate(requests)
    rollout = NativeRollout(config(max_num_seqs=3), llama, CPU)
    told = []
    numbers = []
    with rollout.stepping():
        for request in requests:
            on_token = lambda *what: told.append(what)  # noqa: E731
            numbers.append(rollout.add(request, on_token, finished.__setitem__))
            for _ in range(3):
                rollout.step()
        while rollout.has_work():
            rollout.step()
    completions = [finished[number] for number in numbers]
    assert tokens(completions) == tokens(expected)
    for number, completion in zip(numbers, completions, strict=True):
        heard = [(token, log_prob) for who, token, log_prob in told if who == number]
        pairs = zip(completion.token_ids, completion.log_probs, strict=True)
        assert heard == list(pairs)


def test_the_cache_grows_under_requests_in_flight(
    llama: PreTrainedModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    finished: dict[int, Completion],
) -> None:
    requests = make_requests([5, 40, 60], max_tokens=30)
    expected = NativeRollout(config(), llama, CPU).generate(requests)
    rollout = NativeRollout(config(), llama, CPU)
    sizes = []
    with rollout.stepping():
        for request in requests:
            rollout.add(request, None, finished.__setitem__)
            for _ in range(4):
                rollout.step()
            sizes.append(rollout.cache_bytes)
        while rollout.has_work():
            rollout.step()
    assert sizes == sorted(set(sizes))
    assert tokens(finished.values()) == tokens(expected)


def test_an_aborted_request_gives_what_it_has(
    llama: PreTrainedModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    finished: dict[int, Completion],
) -> None:
    first, second, waits = make_requests([5, 9, 4], max_tokens=20)
    expected = NativeRollout(config(), llama, CPU).generate([first, second])
    rollout = NativeRollout(config(max_num_seqs=2), llama, CPU)
    numbers = [rollout.add(each, None, finished.__setitem__) for each in (first, second, waits)]
    number = rollout.add(second)
    with rollout.stepping():
        for _ in range(5):
            rollout.step()
    partial = rollout.abort(numbers[0])
    assert (partial.finish_reason, partial.weight_version) == ("abort", 0)
    assert partial.token_ids == expected[0].token_ids[:5]
    assert len(partial.log_probs) == 5
    empty = rollout.abort(numbers[2])
    assert empty == Completion([], [], "abort", 0)
    assert rollout.abort(number) == Completion([], [], "abort", 0)
    run(rollout)
    assert list(finished) == [numbers[1]]
    assert finished[numbers[1]].token_ids == expected[1].token_ids
    assert rollout.abort(numbers[1]) is None
    assert not rollout.has_work()


def test_new_weights_under_way_are_those_of_the_later_tokens(
    build_model: BuildModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    finished: dict[int, Completion],
) -> None:
    requests = make_requests([5, 20, 33], temperature=0.0, max_tokens=20)
    module, other = build_model(seed=0), build_model(seed=1)
    rollout = NativeRollout(config(max_num_seqs=2), module, CPU)
    numbers = [rollout.add(request, None, finished.__setitem__) for request in requests]
    with rollout.stepping():
        for _ in range(8):
            rollout.step()
    rollout.load_weights(other.state_dict().items(), version=3)
    run(rollout)
    completions = [finished[number] for number in numbers]
    assert [c.weight_versions for c in completions] == [
        ((0, 8), (3, 12)),
        ((0, 8), (3, 12)),
        ((3, 20),),
    ]
    assert [c.weight_version for c in completions] == [0, 0, 3]
    assert completions[0].token_versions() == [0] * 8 + [3] * 12
    before = NativeRollout(config(), build_model(seed=0), CPU).generate(requests)
    for request, old, completion in zip(requests, before, completions, strict=True):
        count = 0 if completion.weight_version else 8
        assert completion.token_ids[:count] == old.token_ids[:count]
        # as if the first tokens had been part of the prompt
        prompt = [*request.prompt_ids, *completion.token_ids[:count]]
        rest = replace(
            request, prompt_ids=prompt, params=replace(request.params, max_tokens=20 - count)
        )
        after = NativeRollout(config(), other, CPU).generate([rest])[0]
        assert completion.token_ids[count:] == after.token_ids
        assert completion.log_probs[count:] == pytest.approx(after.log_probs, abs=1e-4)


def test_eviction_joins_the_tokens_of_one_version(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([14, 15, 16], max_tokens=40, temperature=0.0)
    rollout = NativeRollout(config(kv_cache_blocks=5), llama, CPU)
    rollout.version = 4
    completions = rollout.generate(requests)
    assert [c.weight_versions for c in completions] == [((4, 40),)] * 3


def test_a_version_set_from_outside_recomputes_the_cache(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([5, 20], temperature=0.0, max_tokens=10)
    module = build_model(seed=0)
    rollout = NativeRollout(config(), module, CPU)
    finished: dict[int, Completion] = {}
    for request in requests:
        rollout.add(request, None, finished.__setitem__)
    with rollout.stepping():
        for _ in range(4):
            rollout.step()
    module.load_state_dict(build_model(seed=1).state_dict())
    rollout.version = 1
    run(rollout)
    assert [c.weight_versions for c in finished.values()] == [((0, 4), (1, 6))] * 2


def test_sleep_keeps_requests_in_flight(
    llama: PreTrainedModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    finished: dict[int, Completion],
) -> None:
    requests = make_requests([5, 20, 33], max_tokens=20)
    expected = NativeRollout(config(), llama, CPU).generate(requests)
    rollout = NativeRollout(config(), llama, CPU)
    for request in requests:
        rollout.add(request, None, finished.__setitem__)
    with rollout.stepping():
        for _ in range(8):
            rollout.step()
    rollout.sleep()
    assert rollout.cache_bytes == 0 and rollout.has_work()
    with pytest.raises(RolloutError, match="wake it up"):
        rollout.add(requests[0])
    rollout.wake_up()
    run(rollout)
    assert tokens(finished.values()) == tokens(expected)


def test_a_step_that_fails_leaves_a_sampler_that_works(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([5, 20], max_tokens=6)
    rollout = NativeRollout(config(), build_model(), CPU)
    expected = rollout.generate(requests)

    def refuse(index: Any, completion: Completion) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rollout.generate(requests, refuse)
    assert not rollout.has_work()
    assert rollout.generate(requests) == expected
