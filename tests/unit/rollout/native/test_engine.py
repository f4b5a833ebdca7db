from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from caldera.errors import RolloutError
from caldera.rollout import Completion, HFRollout, NativeRollout, Request
from caldera.rollout.native.sampler import SamplingRows, sample
from caldera.rollout.native.scheduler import Scheduler
from caldera.rollout.native.steps import Decode, Prefill

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]
LENGTHS = [1, 5, 15, 16, 17, 31, 40, 3]


def reference_logits(model: PreTrainedModel, request: Any, completion: Completion) -> Any:
    """Logits (R, V) of a plain forward, from which each token was sampled."""
    sequence = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        return model(sequence).logits[0, len(request.prompt_ids) - 1 : -1]


def assert_log_probs(
    model: PreTrainedModel,
    requests: Any,
    completions: Iterable[Completion],
    temperature: float = 1.0,
) -> None:
    for request, completion in zip(requests, completions, strict=True):
        logits = reference_logits(model, request, completion) / temperature
        chosen = torch.tensor(completion.token_ids)[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def tokens(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the scheduler decided, step by step."""
    taken = []
    schedule = Scheduler.schedule

    def spy(self: Any) -> Any:
        taken.append(schedule(self))
        return taken[-1]

    monkeypatch.setattr(Scheduler, "schedule", spy)
    return taken


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(
    family: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests(LENGTHS, temperature=0.0, max_tokens=20)
    model = build_model(family)
    native = NativeRollout(config(), model, CPU).generate(requests)
    hf = HFRollout(config(), model, CPU).generate(requests)
    assert tokens(native) == tokens(hf)
    assert len({tuple(t) for t in tokens(native)}) == len(LENGTHS)
    assert_log_probs(build_model(family, attention="eager"), requests, native)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_samples_are_those_of_a_plain_forward(
    family: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests(LENGTHS, temperature=0.8, max_tokens=20)
    completions = NativeRollout(config(), build_model(family), CPU).generate(requests)
    reference = build_model(family, attention="eager")
    assert_log_probs(reference, requests, completions, temperature=0.8)


def test_raw_log_probs_ignore_temperature_and_filters(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([4, 9], temperature=0.5, top_k=3)
    raw = config(logprobs_mode="raw_logprobs")
    completions = NativeRollout(raw, build_model(), CPU).generate(requests)
    assert_log_probs(build_model(attention="eager"), requests, completions)


def test_samples_follow_the_model(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    model = build_model()
    request = replace(make_requests([6], max_tokens=2)[0])
    count = 4000
    requests = [replace(request, seed=seed) for seed in range(count)]
    completions = NativeRollout(config(max_num_seqs=1024), model, CPU).generate(requests)
    logits = reference_logits(build_model(attention="eager"), request, completions[0])
    observed = Counter(c.token_ids[0] for c in completions)
    expected = logits[0].softmax(-1)
    # chi-square over the tokens expected at least five times, the others together
    likely = [t for t in range(48) if expected[t] * count >= 5]
    rest = count - sum(observed[t] for t in likely)
    mass = count * (1 - sum(expected[t].item() for t in likely))
    chi_square = sum(
        (observed[t] - expected[t] * count) ** 2 / (expected[t] * count) for t in likely
    )
    chi_square += (rest - mass) ** 2 / max(mass, 1)
    assert len(likely) > 5
    assert chi_square < len(likely) + 4 * (2 * len(likely)) ** 0.5
    assert len({tuple(c.token_ids) for c in completions}) > 50


def test_each_token_has_its_own_random_number(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = [replace(make_requests([6], top_p=0.95)[0], seed=seed) for seed in (-1, 0, 2**70)]
    completions = NativeRollout(config(), build_model(), CPU).generate(requests)
    reference = build_model(attention="eager")
    for request, completion in zip(requests, completions, strict=True):
        count = len(completion.token_ids)
        replayed = SamplingRows(
            temperature=np.ones(count, dtype=np.float32),
            top_k=np.full(count, -1),
            top_p=np.full(count, 0.95),
            min_p=np.zeros(count),
            seed=np.full(count, request.seed % 2**64, dtype=np.uint64),
            generated=np.arange(count),
        )
        logits = reference_logits(reference, request, completion)
        assert sample(logits, replayed, False)[0].tolist() == completion.token_ids


@pytest.mark.parametrize(
    "keys",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 20},
        {"kv_cache_blocks": 6},
        {"kv_cache_blocks": 8, "max_num_seqs": 5, "max_num_batched_tokens": 50},
    ],
)
def test_a_sample_does_not_depend_on_what_it_is_batched_with(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, keys: dict[str, Any]
) -> None:
    requests = make_requests(LENGTHS * 2, max_tokens=40, top_p=0.9)
    expected = NativeRollout(config(), llama, CPU).generate(requests)
    completions = NativeRollout(config(**keys), llama, CPU).generate(requests)
    assert tokens(completions) == tokens(expected)
    for ours, theirs in zip(completions, expected, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
    reversed_order = NativeRollout(config(), llama, CPU).generate(requests[::-1])
    assert tokens(reversed_order[::-1]) == tokens(expected)


def test_too_few_pages_evict_the_last_and_lose_nothing(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    requests = make_requests([14, 15, 16], max_tokens=40, temperature=0.0)
    expected = NativeRollout(config(), llama, CPU).generate(requests)
    steps.clear()
    completions = NativeRollout(config(kv_cache_blocks=5), llama, CPU).generate(requests)
    assert tokens(completions) == tokens(expected)
    prefills = [step.counts.tolist() for step in steps if isinstance(step, Prefill)]
    assert len(prefills) > 1
    assert max(prefills[1]) > 16  # prompt and what was sampled, again
    reference = NativeRollout(config(), llama, CPU).generate(requests)
    for ours, theirs in zip(completions, reference, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_samples_of_one_prompt_prefill_once(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    first, second = make_requests([37, 16], max_tokens=8)
    requests = [
        replace(request, seed=10 * seed + len(request.prompt_ids))
        for seed in range(4)
        for request in (first, second)
    ]
    together = NativeRollout(config(), llama, CPU).generate(requests)
    assert [step.counts.tolist() for step in steps if isinstance(step, Prefill)] == [[37, 16]]
    assert steps[0].leaders.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(steps[0].page_copies) == 3  # the partly filled page of the first prompt
    assert sum(isinstance(step, Decode) for step in steps) == 7
    alone = [NativeRollout(config(), llama, CPU).generate([request])[0] for request in requests]
    assert tokens(together) == tokens(alone)
    assert len({tuple(t) for t in tokens(together)}) == 8


def test_forks_share_pages_when_memory_is_short(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    request = make_requests([48], max_tokens=16)[0]
    requests = [replace(request, seed=seed) for seed in range(6)]
    # six sequences of four pages in nine pages: three shared, one each
    NativeRollout(config(kv_cache_blocks=9), llama, CPU).generate(requests)
    assert [len(step.rows) for step in steps if isinstance(step, Prefill)] == [6]


def test_stop_tokens_end_a_completion(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = NativeRollout(config(), llama, CPU)
    free = rollout.generate(make_requests([4, 6], temperature=0.0))
    assert {c.finish_reason for c in free} == {"length"}
    stop = free[0].token_ids[4]
    end = free[0].token_ids.index(stop) + 1
    stops = frozenset({stop, 47})
    stopped = rollout.generate(make_requests([4, 6], temperature=0.0, stop_token_ids=stops))[0]
    assert stopped.token_ids == free[0].token_ids[:end]
    assert stopped.log_probs == pytest.approx(free[0].log_probs[:end], abs=1e-5)
    assert stopped.finish_reason == "stop"


def test_ignore_eos_goes_on(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = NativeRollout(config(), llama, CPU)
    everything = frozenset(range(48))
    ended = rollout.generate(make_requests([4], stop_token_ids=everything))[0]
    assert (len(ended.token_ids), ended.finish_reason) == (1, "stop")
    ignored = rollout.generate(make_requests([4], stop_token_ids=everything, ignore_eos=True))[0]
    assert (len(ignored.token_ids), ignored.finish_reason) == (12, "length")


def test_requests_of_different_parameters_are_batched(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    mixed: list[Request] = [
        make_requests([5], temperature=0.0)[0],
        make_requests([7], temperature=0.7, top_k=4, max_tokens=30)[0],
        make_requests([9], max_tokens=1)[0],
        make_requests([30], top_p=0.5, stop_token_ids=frozenset({3, 4, 5}))[0],
    ]
    together = NativeRollout(config(), llama, CPU).generate(mixed)
    alone = [NativeRollout(config(), llama, CPU).generate([request])[0] for request in mixed]
    assert tokens(together) == tokens(alone)
    assert [c.finish_reason for c in together] == [c.finish_reason for c in alone]


def test_the_cache_is_as_large_as_the_requests_need(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = NativeRollout(config(max_num_seqs=2), llama, CPU)
    page_bytes = 2 * 2 * 16 * 2 * 8 * 4  # keys and values, layers, tokens, heads, head_dim, float32
    assert rollout.cache_bytes == 0
    rollout.generate(make_requests([4, 4, 4], max_tokens=12))
    assert rollout.cache_bytes == 2 * page_bytes
    rollout.generate(make_requests([30, 4, 30], max_tokens=12))
    assert rollout.cache_bytes == 2 * 3 * page_bytes
    rollout.generate(make_requests([4], max_tokens=12))
    assert rollout.cache_bytes == 2 * 3 * page_bytes


def test_a_cache_of_just_what_is_needed_is_used_at_once(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    requests = make_requests([12] * 6, max_tokens=4)  # each within one page
    NativeRollout(config(kv_cache_blocks=6), llama, CPU).generate(requests)
    assert [len(step.rows) for step in steps] == [6] * 4


def test_sequences_are_admitted_while_others_run(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    requests = make_requests([4, 4, 4], max_tokens=3) + make_requests([5], max_tokens=9)
    NativeRollout(config(max_num_seqs=2), llama, CPU).generate([requests[3], *requests[:3]])
    kinds = [(type(step).__name__, len(step.rows)) for step in steps]
    # the newcomer runs beside the one that is decoded
    assert kinds[:4] == [("Prefill", 2), ("Decode", 2), ("Decode", 2), ("Prefill", 2)]
    assert steps[3].counts.tolist() == [1, 4]
    assert [len(step.rows) for step in steps[4:6]] == [2, 2]


def test_sleep_frees_the_cache(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = NativeRollout(config(), llama, CPU)
    requests = make_requests([4, 9])
    first = rollout.generate(requests)
    assert rollout.cache_bytes > 0
    rollout.sleep()
    assert rollout.cache_bytes == 0
    with pytest.raises(RolloutError, match="wake it up"):
        rollout.generate(requests)
    rollout.wake_up("weights")
    with pytest.raises(RolloutError, match="wake it up"):
        rollout.generate(requests)
    rollout.wake_up("kv_cache")
    assert rollout.generate(requests) == first


def test_a_request_that_can_never_fit_is_refused(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    rollout = NativeRollout(config(kv_cache_blocks=2), llama, CPU)
    with pytest.raises(RolloutError, match=r"request 1 needs 3 pages of 16 tokens.* has 2"):
        rollout.generate(make_requests([4, 22]))
    assert steps == []


def test_each_completion_is_told_of_when_it_ends(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([4], max_tokens=6) + make_requests([4, 5], max_tokens=2)
    told = []
    completions = NativeRollout(config(), llama, CPU).generate(
        requests, lambda index, completion: told.append((index, completion))
    )
    assert [index for index, _ in told] == [1, 2, 0]
    assert all(completion is completions[index] for index, completion in told)
