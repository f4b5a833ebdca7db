"""Pages that outlive their request, and prompts that run in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from caldera.rollout import Completion, NativeRollout, Request, SamplingParams
from caldera.rollout.native.blocks import BlockManager, extend_block_hashes
from caldera.rollout.native.scheduler import Scheduler
from caldera.rollout.native.steps import Decode, Prefill

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "mistral", "gemma3"]


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


def tokens(completions: Iterable[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def assert_same(ours: Any, theirs: Any) -> None:
    assert tokens(ours) == tokens(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def prefilled(steps: list[Any]) -> Any:
    return sum(len(step.token_ids) for step in steps if isinstance(step, Prefill))


def test_a_key_names_all_tokens_up_to_the_end_of_its_page() -> None:
    keys: list[bytes] = []
    one = np.arange(40)
    extend_block_hashes(keys, one, 2)
    again: list[bytes] = []
    extend_block_hashes(again, one.astype(np.int32), 1)
    extend_block_hashes(again, one, 2)
    assert keys == again and len(set(keys)) == 2
    other: list[bytes] = []
    extend_block_hashes(other, np.concatenate([[7], one[1:]]), 2)
    assert not set(other) & set(keys)


def test_pages_are_found_until_their_memory_is_wanted() -> None:
    blocks = BlockManager(pages=6, rows=3)
    blocks.allocate(0, 48)
    blocks.keep(0, [b"a", b"b", b"c"])
    pages = blocks.tables[0, :3].tolist()
    blocks.free(0)
    assert blocks.free_pages == 6 and not blocks.is_empty
    assert blocks.find([b"a", b"b", b"x", b"c"]).tolist() == pages[:2]
    assert blocks.find([b"b"]).tolist() == pages[1:2]
    blocks.allocate(1, 80, blocks.find([b"a"]))  # five pages, one of them shared
    assert blocks.tables[1, 0] == pages[0]
    assert blocks.free_pages == 1
    assert blocks.find([b"a", b"b", b"c"]).tolist() == pages[:2]  # the end went first
    blocks.forget()
    assert blocks.find([b"a"]).tolist() == []
    blocks.free(1)
    assert blocks.is_empty


def test_a_page_in_use_is_shared_and_not_given_out() -> None:
    blocks = BlockManager(pages=4, rows=3)
    blocks.allocate(0, 32)
    blocks.keep(0, [b"a", b"b"])
    blocks.allocate(1, 20, blocks.find([b"a"]))
    assert blocks.references[blocks.tables[0, 0]] == 2
    blocks.free(0)
    blocks.allocate(2, 32)
    assert blocks.find([b"a"]).tolist() == [blocks.tables[1, 0]]
    assert blocks.find([b"b"]).tolist() == []
    assert blocks.free_pages == 0


def test_pages_without_rows_grow_and_go_with_the_cache() -> None:
    blocks = BlockManager(pages=2, rows=1)
    blocks.allocate(0, 32)
    blocks.grow(5)
    assert (blocks.pages, blocks.free_pages) == (5, 3)
    blocks.append(np.array([0]))
    assert blocks.tables[0, :3].tolist() == [0, 1, 2]
    blocks.free(0)
    blocks.drop()
    assert (blocks.pages, blocks.free_pages) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_turn_runs_only_what_is_new(
    family: str,
    build_model: BuildModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    steps: list[Any],
) -> None:
    model = build_model(family)
    rollout = NativeRollout(config(enable_prefix_caching=True), model, CPU)
    turns = make_requests([20, 37, 16], max_tokens=18, top_p=0.9)
    answers = rollout.generate(turns)
    later = [
        replace(request, prompt_ids=[*request.prompt_ids, *answer.token_ids, 3, 4, 5, 6])
        for request, answer in zip(turns, answers, strict=True)
    ]
    steps.clear()
    found = rollout.generate(later)
    assert isinstance(steps[0], Prefill) and not steps[0].is_whole
    # full pages of what was cached: prompt and answer, less the last token
    assert steps[0].positions[np.cumsum([0, *steps[0].counts[:-1]])].tolist() == [32, 48, 32]
    assert_same(found, NativeRollout(config(), model, CPU).generate(later))


def test_samples_of_one_prompt_that_come_later_share_it(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    request = make_requests([50], max_tokens=8)[0]
    requests = [replace(request, seed=seed) for seed in range(5)]
    rollout = NativeRollout(config(enable_prefix_caching=True, max_num_seqs=2), llama, CPU)
    completions = rollout.generate(requests)
    assert prefilled(steps) == 50 + 2 * 2  # twice two rows come in, and fork: 2 tokens each
    assert_same(completions, NativeRollout(config(), llama, CPU).generate(requests))


@pytest.mark.parametrize("drop", ["weights", "wake", "sleep"])
def test_prefixes_are_dropped(
    drop: str,
    build_model: BuildModel,
    config: MakeConfig,
    make_requests: MakeRequests,
    steps: list[Any],
) -> None:
    module = build_model()
    rollout = NativeRollout(config(enable_prefix_caching=True), module, CPU)
    requests = make_requests([40], max_tokens=4)
    first = rollout.generate(requests)
    steps.clear()
    rollout.generate(requests)
    assert prefilled(steps) == 40 - 32
    if drop == "weights":
        rollout.load_weights(module.state_dict().items(), version=0)
    elif drop == "sleep":
        rollout.sleep()
    if drop != "weights":
        rollout.wake_up()
    steps.clear()
    assert rollout.generate(requests) == first
    assert prefilled(steps) == 40


def test_without_the_key_nothing_is_kept(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    rollout = NativeRollout(config(), llama, CPU)
    requests = make_requests([40], max_tokens=4)
    rollout.generate(requests)
    rollout.generate(requests)
    assert prefilled(steps) == 80


def test_a_long_prompt_does_not_stop_the_decoding(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    keys = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}
    rollout = NativeRollout(config(**keys), llama, CPU)
    short, long = make_requests([4, 60], max_tokens=20)
    finished: dict[int, Completion] = {}
    rollout.add(short, None, finished.__setitem__)
    with rollout.stepping():
        rollout.step()
        rollout.add(long, None, finished.__setitem__)
        while rollout.has_work():
            rollout.step()
    # one token of the short sequence and 23 of the prompt at a time
    assert [type(step) for step in steps[:5]] == [Prefill] * 4 + [Decode]
    assert [step.counts.tolist() for step in steps[1:4]] == [[1, 23], [1, 23], [1, 14]]
    assert [len(step.rows) for step in steps[1:5]] == [1, 1, 2, 2]
    assert_same(
        list(finished.values()), NativeRollout(config(), llama, CPU).generate([short, long])
    )


def test_chunks_of_one_prompt_are_forked_at_their_end(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests, steps: list[Any]
) -> None:
    keys = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
    request = make_requests([50], max_tokens=6)[0]
    requests = [replace(request, seed=seed) for seed in range(3)]
    completions = NativeRollout(config(**keys), llama, CPU).generate(requests)
    assert_same(completions, NativeRollout(config(), llama, CPU).generate(requests))
    assert [step.counts.tolist() for step in steps[:2]] == [[32], [18]]
    assert [len(step.rows) for step in steps[:7]] == [0, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_whole_prompts_give(
    family: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([1, 5, 15, 16, 17, 31, 60, 3, 33], max_tokens=30, top_p=0.9)
    requests += [replace(request, seed=request.seed + 50) for request in requests[4:7]]
    model = build_model(family)
    expected = NativeRollout(config(), model, CPU).generate(requests)
    keys = {"enable_chunked_prefill": True, "max_num_batched_tokens": 20, "kv_cache_blocks": 12}
    assert_same(NativeRollout(config(**keys), model, CPU).generate(requests), expected)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_mix_of_keys_and_turns_gives_the_same_samples(
    data: Any, llama_model: Any, rollout_config: Callable[..., Any]
) -> None:
    """Turns of conversations, in any order, with any limits, against one plain batch."""
    keys = {
        "enable_prefix_caching": data.draw(st.booleans()),
        "enable_chunked_prefill": data.draw(st.booleans()),
        "max_num_batched_tokens": data.draw(st.sampled_from([1, 7, 16, 33, 8192])),
        "max_num_seqs": data.draw(st.sampled_from([1, 2, 5, 256])),
        "kv_cache_blocks": data.draw(st.sampled_from([None, 8, 11])),
    }
    rollout = NativeRollout(rollout_config(**keys), llama_model, CPU)
    plain = NativeRollout(rollout_config(), llama_model, CPU)
    params = SamplingParams(max_tokens=9, top_p=0.9)
    starts = [[seed + 1] * length for seed, length in enumerate((5, 17, 40))]
    for turn in range(2):
        chosen = data.draw(st.lists(st.sampled_from(range(3)), min_size=1, max_size=5))
        requests = [Request(starts[i], params, 10 * turn + n) for n, i in enumerate(chosen)]
        completions = rollout.generate(requests)
        assert_same(completions, plain.generate(requests))
        for i, completion in zip(chosen, completions, strict=True):
            starts[i] = [*starts[i], *completion.token_ids][:60]


@pytest.fixture(scope="module")
def llama_model(llama: PreTrainedModel) -> Any:
    return llama


@pytest.fixture(scope="module")
def rollout_config() -> Callable[..., Any]:
    from caldera.config import RolloutConfig

    return lambda **keys: RolloutConfig(prompt_length=64, response_length=64, **keys)
