"""Steps that begin before the tokens of the step before are known."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from caldera.config import RolloutConfig
from caldera.models.attention import ATTENTION
from caldera.rollout.base import Completion, Request, SamplingParams
from caldera.rollout.native.engine import NativeRollout
from caldera.rollout.native.steps import InFlightStep, Step
from caldera.rollout.service import AsyncSampler

CPU = torch.device("cpu")
STOPS = frozenset(range(20, 26))


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


class Delayed(NativeRollout):
    """The tokens of a step are looked at when the next one has begun, as on CUDA."""

    def __init__(self, config: RolloutConfig, module: PreTrainedModel) -> None:
        super().__init__(config, module, CPU)
        self._runner.max_steps_in_flight = 1


def config(**keys: object) -> RolloutConfig:
    return RolloutConfig(max_model_len=160, **keys)  # type: ignore[arg-type]


def told(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(each.token_ids, each.finish_reason) for each in completions]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_same_is_sampled(module: PreTrainedModel, data: st.DataObject) -> None:
    keys = {
        "enable_prefix_caching": data.draw(st.booleans()),
        "enable_chunked_prefill": data.draw(st.booleans()),
        "max_num_seqs": data.draw(st.integers(1, 6)),
        "max_num_batched_tokens": data.draw(st.integers(16, 100)),
        "kv_cache_blocks": data.draw(st.integers(10, 24)),
    }
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    requests = [
        Request(
            [(7 * i + j) % 64 for j in range(length)],
            SamplingParams(
                max_tokens=data.draw(st.integers(1, 40)), stop_token_ids=STOPS,
                temperature=data.draw(st.sampled_from([0.0, 1.0])),
                top_k=data.draw(st.sampled_from([-1, 9])),
                repetition_penalty=data.draw(st.sampled_from([1.0, 1.0, 1.0, 1.3])),
            ),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip
    patient, delayed = NativeRollout(config(**keys), module, CPU), Delayed(config(**keys), module)
    for _ in range(2):
        want, got = patient.generate(requests), delayed.generate(requests)
        assert told(got) == told(want)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5
            )
    assert not delayed._in_flight
    assert delayed._blocks.free_pages == delayed._blocks.pages


def test_requests_come_and_go_while_a_step_is_under_way(module: PreTrainedModel) -> None:
    delayed = Delayed(config(max_num_seqs=4, enable_prefix_caching=True), module)
    heard: dict[int, list[int]] = {}
    ended: dict[int, Completion] = {}
    requests = [Request([1, 2, i], SamplingParams(max_tokens=12), i) for i in range(6)]
    want = NativeRollout(config(max_num_seqs=4), module, CPU).generate(requests)
    with delayed.stepping():
        numbers = []
        for request in requests:
            numbers.append(
                delayed.add(
                    request,
                    lambda number, token, _: heard.setdefault(number, []).append(token),
                    lambda number, completion: ended.update({number: completion}),
                )
            )
            delayed.step()
        dropped = delayed.abort(numbers[0])
        while delayed.has_work():
            delayed.step()
    assert dropped is not None and dropped.finish_reason == "abort"
    assert dropped.token_ids == want[0].token_ids[: len(dropped.token_ids)] == heard[numbers[0]]
    assert numbers[0] not in ended
    for number, completion in zip(numbers[1:], want[1:], strict=True):
        assert ended[number].token_ids == completion.token_ids == heard[number]


def test_an_abort_that_finds_the_last_token_on_its_way(module: PreTrainedModel) -> None:
    """Whoever gave a stream up must not hear of it; whoever waits gets all that there is."""

    async def run() -> tuple[Completion, Completion]:
        delayed = Delayed(config(), module)
        async with AsyncSampler(delayed) as sampler:
            other = asyncio.create_task(
                sampler.generate(Request([3, 4], SamplingParams(max_tokens=60), 9))
            )
            async for piece in sampler.stream(Request([1, 2], SamplingParams(max_tokens=40), 1)):
                if len(piece.token_ids):
                    break
            named = asyncio.create_task(
                sampler.generate(Request([1, 2], SamplingParams(max_tokens=2), 1), "short")
            )
            await asyncio.sleep(0)
            await sampler.abort("short")
            await sampler.pause()
            assert not delayed._in_flight
            await sampler.resume()
            return await named, await other

    short, long = asyncio.run(run())
    whole = NativeRollout(config(), module, CPU).generate(
        [Request([1, 2], SamplingParams(max_tokens=2), 1)]
    )[0]
    assert short.token_ids == whole.token_ids[: len(short.token_ids)]
    assert len(long.token_ids) == 60


def _keep(ended: list[Completion], _: int, completion: Completion) -> None:
    ended.append(completion)


def test_whoever_listens_may_abort_at_the_last_token(module: PreTrainedModel) -> None:
    for rollout in (NativeRollout(config(), module, CPU), Delayed(config(), module)):
        ended: list[Completion] = []

        def give_up(number: int, token: int, _: float, of: NativeRollout = rollout) -> None:
            if token >= 0 and number == 0:
                of.abort(number)

        with rollout.stepping():
            rollout.add(Request([1], SamplingParams(max_tokens=1), 0), give_up)
            heard = partial(_keep, ended)
            rollout.add(Request([2], SamplingParams(max_tokens=3), 0), None, heard)
            while rollout.has_work():
                rollout.step()
        assert len(ended[0].token_ids) == 3


def test_new_weights_wait_for_the_step_under_way(module: PreTrainedModel) -> None:
    delayed = Delayed(config(), module)
    ended: list[Completion] = []
    params = SamplingParams(max_tokens=10)
    delayed.add(Request([1, 2], params, 0), None, lambda _, completion: ended.append(completion))
    with delayed.stepping():
        for _ in range(4):
            delayed.step()
        delayed.version = 1
        while delayed.has_work():
            delayed.step()
    assert ended[0].weight_versions == ((0, 4), (1, 6))


def test_a_cache_that_is_made_anew_and_smaller(module: PreTrainedModel) -> None:
    """Rows of very different lengths are gathered with what lies behind their own pages."""
    rollout = NativeRollout(config(), module, CPU)
    rollout.generate([Request([1] * 100, SamplingParams(max_tokens=40), i) for i in range(6)])
    rollout.sleep()
    rollout.wake_up()
    small = [Request([1] * n, SamplingParams(max_tokens=3), n) for n in (30, 20, 1, 1, 1, 1)]
    want = NativeRollout(config(), module, CPU).generate(small)
    assert told(rollout.generate(small)) == told(want)


def test_tokens_that_were_told_to_another_step_are_noticed() -> None:
    told = torch.tensor([[5, -1], [0, 0]], dtype=torch.int32)
    numbers = np.arange(2)
    with pytest.raises(AssertionError, match="another"):
        InFlightStep(cast(Step, None), numbers, numbers, told).synchronize()
