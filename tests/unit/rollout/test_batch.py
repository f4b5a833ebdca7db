from __future__ import annotations

import numpy as np
import pytest
import torch

from caldera.config import ValKwargs
from caldera.errors import ProtocolError, RolloutError
from caldera.protocol import DataProto
from caldera.rollout import Completion
from caldera.rollout.batch import completions_to_batch, requests_from_batch


def prompts(**meta) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        },
        meta_info=meta,
    )


def test_requests_take_the_attended_tokens(config):
    settings = config(prompt_length=4, response_length=3, temperature=0.8, top_k=9, top_p=0.7)
    requests = requests_from_batch(prompts(), settings, [2, 3], seeds=[11, 12])
    assert [request.prompt_ids for request in requests] == [[5, 6], [7, 8, 9, 10]]
    assert [request.seed for request in requests] == [11, 12]
    params = requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 9, 0.7)
    assert params.stop_token_ids == {2, 3}
    assert not params.ignore_eos
    assert params.max_tokens == 3


def test_requests_prefer_the_raw_prompt(config):
    batch = prompts()
    raw = np.empty(2, dtype=object)
    raw[0], raw[1] = [5, 6], np.array([8, 9])
    batch.non_tensor_batch["raw_prompt_ids"] = raw
    requests = requests_from_batch(batch, config(), [2], seeds=[0, 1])
    assert [request.prompt_ids for request in requests] == [[5, 6], [8, 9]]


@pytest.mark.parametrize(
    ("meta", "temperature", "top_k"),
    [
        ({}, 0.8, 9),
        ({"do_sample": False}, 0.0, 9),
        ({"temperature": 0.5}, 0.5, 9),
        ({"validate": True}, 0.0, 4),
        ({"validate": True, "do_sample": True}, 0.3, 4),
        ({"validate": True, "do_sample": True, "temperature": 0.6}, 0.6, 4),
        ({"validate": False}, 0.8, 9),
    ],
)
def test_meta_information_overrides_the_config(config, meta, temperature, top_k):
    validation = ValKwargs(temperature=0.3, top_k=4)
    settings = config(temperature=0.8, top_k=9, val_kwargs=validation)
    params = requests_from_batch(prompts(**meta), settings, [2], seeds=[0, 1])[0].params
    assert (params.temperature, params.top_k) == (temperature, top_k)


def test_new_tokens_fit_the_model(config):
    settings = config(prompt_length=4, response_length=3, max_model_len=6)
    requests = requests_from_batch(prompts(), settings, [2], seeds=[0, 1])
    assert [request.params.max_tokens for request in requests] == [3, 2]
    settings = config(prompt_length=4, response_length=3, max_model_len=4)
    with pytest.raises(RolloutError, match=r"prompt of 4 tokens .*max_model_len is 4"):
        requests_from_batch(prompts(), settings, [2], seeds=[0, 1])


def test_each_prompt_needs_a_seed(config):
    with pytest.raises(ProtocolError, match=r"2 prompts .* got 1"):
        requests_from_batch(prompts(), config(), [2], seeds=[0])


def test_completions_become_padded_tensors():
    completions = [
        Completion([20, 21, 2], [-0.5, -0.25, -0.125], "stop", 0),
        Completion([30], [-1.0], "length", 0),
    ]
    batch = completions_to_batch(
        prompts(), completions, 4, pad_token_id=1, calculate_log_probs=True
    )
    expected = {
        "prompts": [[0, 0, 5, 6], [7, 8, 9, 10]],
        "responses": [[20, 21, 2, 1], [30, 1, 1, 1]],
        "input_ids": [[0, 0, 5, 6, 20, 21, 2, 1], [7, 8, 9, 10, 30, 1, 1, 1]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 4, 4, 4]],
        "response_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "rollout_log_probs": [[-0.5, -0.25, -0.125, 0.0], [-1.0, 0.0, 0.0, 0.0]],
    }
    assert {key: batch.batch[key].tolist() for key in batch.batch.keys()} == expected  # noqa: SIM118
    integers = set(expected) - {"rollout_log_probs"}
    assert all(batch.batch[key].dtype == torch.int64 for key in integers)
    assert batch.batch["rollout_log_probs"].dtype == torch.float32


def test_log_probs_are_left_out_unless_asked_for():
    completions = [Completion([2], [-0.5], "stop", 0)] * 2
    batch = completions_to_batch(
        prompts(), completions, 4, pad_token_id=1, calculate_log_probs=False
    )
    assert "rollout_log_probs" not in batch.batch.keys()  # noqa: SIM118


def test_what_does_not_fit_is_refused():
    one = Completion([2] * 5, [-0.5] * 5, "length", 0)
    with pytest.raises(ProtocolError, match="2 prompts, but 1 completions"):
        completions_to_batch(prompts(), [one], 8, 1, True)
    with pytest.raises(ProtocolError, match="completion 0 has 5 tokens, the batch has room for 4"):
        completions_to_batch(prompts(), [one, one], 4, 1, True)
    with pytest.raises(ProtocolError, match="needs the tensor 'input_ids'"):
        empty = DataProto.from_dict(tensors={"x": torch.zeros(1)})
        completions_to_batch(empty, [one], 8, 1, True)
