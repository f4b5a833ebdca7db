from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import PreTrainedModel

from caldera.errors import UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.rollout import Completion, HFRollout

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")


def test_the_attention_and_the_defaults_of_the_model_come_back(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    module = build_model()
    module.generation_config.eos_token_id = list(range(48))  # would stop at once
    module.generation_config.repetition_penalty = 9.0
    defaults = module.generation_config
    rollout = HFRollout(config(), module, CPU)
    completion = rollout.generate(make_requests([5], temperature=0.0))[0]
    assert module.config._attn_implementation == ATTENTION
    assert module.generation_config is defaults
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")
    plain = HFRollout(config(), build_model(), CPU).generate(make_requests([5], temperature=0.0))[0]
    assert completion.token_ids == plain.token_ids


def test_log_probs_before_and_after_temperature_and_filters(
    build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    module = build_model()
    reference = build_model(attention="eager")
    requests = make_requests([6], temperature=0.7, top_k=5)
    processed = HFRollout(config(), module, CPU).generate(requests)[0]
    raw = HFRollout(config(logprobs_mode="raw_logprobs"), module, CPU).generate(requests)[0]
    assert processed.token_ids == raw.token_ids
    sequence = torch.tensor([[*requests[0].prompt_ids, *raw.token_ids]])
    with torch.no_grad():
        logits = reference(sequence).logits[0, 5:-1]  # (R, V)
    chosen = torch.tensor(raw.token_ids)[:, None]
    top = (logits / 0.7).topk(5).values
    expected = (logits / 0.7).gather(1, chosen) - top.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(torch.tensor(processed.log_probs), expected[:, 0], atol=1e-4, rtol=0)
    expected = logits.log_softmax(-1).gather(1, chosen)
    torch.testing.assert_close(torch.tensor(raw.log_probs), expected[:, 0], atol=1e-4, rtol=0)


def test_a_batch_is_a_function_of_its_seeds(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    requests = make_requests([4, 6, 8, 5])
    rollout = HFRollout(config(max_num_seqs=2), llama, CPU)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = rollout.generate(requests)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert rollout.generate(requests) == first


def test_requests_of_different_parameters_keep_their_order(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    mixed = make_requests([4, 6], temperature=0.0) + make_requests(
        [5], temperature=0.0, max_tokens=3
    )
    mixed = [mixed[0], mixed[2], mixed[1]]
    rollout = HFRollout(config(), llama, CPU)
    alone = [rollout.generate([request])[0] for request in mixed]
    told: dict[int, Completion] = {}
    together = rollout.generate(mixed, told.__setitem__)
    assert [told[index] for index in range(3)] == together
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [len(c.token_ids) for c in together] == [12, 3, 12]


def test_stop_tokens_end_a_completion_unless_ignored(
    llama: PreTrainedModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    rollout = HFRollout(config(), llama, CPU)
    free = rollout.generate(make_requests([4, 6], temperature=0.0))
    stop = free[0].token_ids[4]
    first = free[0].token_ids.index(stop)
    stops = frozenset({stop})
    stopped = rollout.generate(make_requests([4, 6], temperature=0.0, stop_token_ids=stops))[0]
    assert stopped.token_ids == free[0].token_ids[: first + 1]
    assert len(stopped.log_probs) == first + 1
    assert stopped.finish_reason == "stop"
    ignoring = make_requests([4, 6], temperature=0.0, stop_token_ids=stops, ignore_eos=True)
    assert rollout.generate(ignoring)[0].token_ids == free[0].token_ids


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_prefix_caching", True),
        ("enable_chunked_prefill", True),
        ("kv_cache_blocks", 8),
    ],
)
def test_options_of_the_native_sampler_are_refused(
    llama: PreTrainedModel, config: MakeConfig, key: str, value: bool | int
) -> None:
    with pytest.raises(UnsupportedError, match=f"rollout.{key}={value}.*name=native"):
        HFRollout(config(**{key: value}), llama, CPU)
