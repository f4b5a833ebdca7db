"""What a request may ask for beside temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import PreTrainedModel

from caldera.errors import RolloutError, UnsupportedError
from caldera.rollout import ROLLOUTS, Completion, HFRollout, NativeRollout, SamplingParams

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "hf"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def letters(token_ids: Any) -> Any:
    return "".join(chr(ord("A") + token) for token in token_ids)


def plain_logits(model: PreTrainedModel, request: Any, completion: Completion) -> Any:
    """Logits (P + R, V) of a plain forward."""
    with torch.no_grad():
        return model(torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0]


def test_a_stop_string_ends_with_the_token_that_completes_it(
    name: str, llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = ROLLOUTS[name](config(), llama, CPU)
    rollout.decode = letters
    free = rollout.generate(make_requests([4, 6], temperature=0.0))
    text = letters(free[0].token_ids)
    stop = text[3:6]
    end = text.index(stop) + 3
    requests = make_requests([4, 6], temperature=0.0, stop=("~~", stop))
    stopped = rollout.generate(requests)[0]
    assert stopped.token_ids == free[0].token_ids[:end]
    assert len(stopped.log_probs) == end
    assert stopped.finish_reason == "stop"


def test_a_stop_string_may_be_in_part_of_the_last_token(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = NativeRollout(config(), llama, CPU)
    rollout.decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
    free = rollout.generate(make_requests([4], temperature=0.0))[0].token_ids
    stop = f"{free[2]}><{free[3]}"
    stopped = rollout.generate(make_requests([4], temperature=0.0, stop=(stop,)))[0]
    assert stopped.token_ids == free[:4]
    whole = rollout.generate(make_requests([4], temperature=0.0, stop=("<x",), max_tokens=12))[0]
    assert (whole.token_ids, whole.finish_reason) == (free, "length")


def test_stop_strings_need_a_decoder(
    name: str, llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    with pytest.raises(RolloutError, match=r"request 0 has stop=\('a',\).*decode"):
        ROLLOUTS[name](config(), llama, CPU).generate(make_requests([4], stop=("a",)))


def test_min_p_leaves_the_likely_ones(
    name: str,
    llama: PreTrainedModel,
    build_model: BuildModel,
    config: MakeConfig,
    make_requests: MakeRequests,
) -> None:
    requests = make_requests([4, 9, 20], min_p=0.2, temperature=0.7)
    reference = build_model(attention="eager")
    for request, completion in zip(
        requests, ROLLOUTS[name](config(), llama, CPU).generate(requests), strict=True
    ):
        logits = plain_logits(reference, request, completion)[len(request.prompt_ids) - 1 : -1]
        scaled = (logits / 0.7).log_softmax(-1)
        kept = scaled.exp() >= 0.2 * scaled.exp().amax(-1, keepdim=True)
        chosen = torch.tensor(completion.token_ids)[:, None]
        assert kept.gather(1, chosen).all()
        expected = scaled.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, chosen)[:, 0]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_penalties_are_those_of_the_whole_sequence(
    llama: PreTrainedModel, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    requests = make_requests([5, 20, 33], temperature=0.0, max_tokens=25, **params)
    requests.append(replace(requests[1], params=replace(requests[1].params, repetition_penalty=1)))
    free = NativeRollout(config(), llama, CPU).generate(
        make_requests([5, 20, 33], temperature=0.0, max_tokens=25)
    )
    rollout = NativeRollout(config(kv_cache_blocks=7), llama, CPU)  # some are evicted
    completions = rollout.generate(requests)
    assert [c.token_ids for c in completions[:3]] != [c.token_ids for c in free]
    reference = build_model(attention="eager")
    for request, completion in zip(requests, completions, strict=True):
        logits = plain_logits(reference, request, completion)
        factor = request.params.repetition_penalty
        for step, token in enumerate(completion.token_ids):
            row = logits[len(request.prompt_ids) - 1 + step].clone()
            sampled = completion.token_ids[:step]
            for seen in {*request.prompt_ids, *sampled}:
                row[seen] = row[seen] / factor if row[seen] > 0 else row[seen] * factor
            for seen in set(sampled):
                row[seen] -= 0.4 + 0.3 * sampled.count(seen)
            assert row.argmax() == token
            expected = row.log_softmax(-1)[token].item()
            assert completion.log_probs[step] == pytest.approx(expected, abs=1e-4)


def test_the_most_likely_tokens_beside_each(
    llama: PreTrainedModel, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([5, 20], logprobs=3, max_tokens=30)
    requests += make_requests([33], max_tokens=30) + make_requests([7], logprobs=99, max_tokens=2)
    rollout = NativeRollout(config(kv_cache_blocks=7), llama, CPU)
    completions = rollout.generate(requests)
    assert completions[2].top_log_probs is None
    assert [len(top) for top in completions[3].top_log_probs] == [48, 48]
    reference = build_model(attention="eager")
    for request, completion in zip(requests[:2], completions[:2], strict=True):
        logits = plain_logits(reference, request, completion)[len(request.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).topk(3)
        ids = [[token for token, _ in top] for top in completion.top_log_probs]
        values = [[value for _, value in top] for top in completion.top_log_probs]
        assert ids == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(values), expected.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
        {"kv_cache_blocks": 7},
    ],
)
def test_log_probs_of_prompts(
    keys: dict[str, Any],
    llama: PreTrainedModel,
    build_model: BuildModel,
    config: MakeConfig,
    make_requests: MakeRequests,
) -> None:
    requests = make_requests([1, 5, 20, 33, 40], prompt_logprobs=True, temperature=0.3)
    requests += [replace(requests[3], seed=9), *make_requests([7])]
    rollout = NativeRollout(config(**keys), llama, CPU)
    rollout.generate(requests[2:4])
    completions = rollout.generate(requests)
    assert completions[-1].prompt_log_probs is None
    assert completions[0].prompt_log_probs == []
    reference = build_model(attention="eager")
    for request, completion in zip(requests[:-1], completions[:-1], strict=True):
        logits = plain_logits(reference, request, completion)
        prompt = torch.tensor(request.prompt_ids)
        expected = logits[: len(prompt) - 1].log_softmax(-1).gather(1, prompt[1:, None])[:, 0]
        assert completion.prompt_log_probs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 2},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"stop": ("",)},
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=next(iter(params))):
        SamplingParams(4, **params)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"logprobs": 1},
        {"prompt_logprobs": True},
    ],
)
def test_hf_names_what_it_cannot_do(
    params: dict[str, Any], llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    with pytest.raises(UnsupportedError, match=f"{next(iter(params))}=.*native"):
        HFRollout(config(), llama, CPU).generate(make_requests([4], **params))
