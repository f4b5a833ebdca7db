from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from caldera.config import ValKwargs
from caldera.errors import ProtocolError, RolloutError
from caldera.protocol import DataProto
from caldera.rollout import ROLLOUTS, Completion, NativeRollout
from caldera.rollout.batch import completions_to_batch, requests_from_batch
from caldera.rollout.engines.host.caldera_engine import sglang_engine, vllm_engine
from caldera.rollout.engines.options import params_as_message
from caldera.rollout.remote import _body as remote_body

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import MakeConfig


def prompts(**meta: Any) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        },
        meta_info=meta,
    )


def test_requests_take_the_attended_tokens(config: MakeConfig) -> None:
    settings = config(prompt_length=4, response_length=3, temperature=0.8, top_k=9, top_p=0.7)
    requests = requests_from_batch(prompts(), settings, [2, 3], seeds=[11, 12])
    assert [request.prompt_ids for request in requests] == [[5, 6], [7, 8, 9, 10]]
    assert [request.seed for request in requests] == [11, 12]
    params = requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 9, 0.7)
    assert params.stop_token_ids == {2, 3}
    assert not params.ignore_eos
    assert params.max_tokens == 3


def test_requests_prefer_the_raw_prompt(config: MakeConfig) -> None:
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
def test_meta_information_overrides_the_config(
    config: MakeConfig, meta: dict[str, Any], temperature: float, top_k: int
) -> None:
    validation = ValKwargs(temperature=0.3, top_k=4)
    settings = config(temperature=0.8, top_k=9, val_kwargs=validation)
    params = requests_from_batch(prompts(**meta), settings, [2], seeds=[0, 1])[0].params
    assert (params.temperature, params.top_k) == (temperature, top_k)


def test_new_tokens_fit_the_model(config: MakeConfig) -> None:
    settings = config(prompt_length=4, response_length=3, max_model_len=6)
    requests = requests_from_batch(prompts(), settings, [2], seeds=[0, 1])
    assert [request.params.max_tokens for request in requests] == [3, 2]
    settings = config(prompt_length=4, response_length=3, max_model_len=4)
    with pytest.raises(RolloutError, match=r"prompt of 4 tokens .*max_model_len is 4"):
        requests_from_batch(prompts(), settings, [2], seeds=[0, 1])


def test_each_prompt_needs_a_seed(config: MakeConfig) -> None:
    with pytest.raises(ProtocolError, match=r"2 prompts .* got 1"):
        requests_from_batch(prompts(), config(), [2], seeds=[0])


def test_completions_become_padded_tensors() -> None:
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


def test_log_probs_are_left_out_unless_asked_for() -> None:
    completions = [Completion([2], [-0.5], "stop", 0)] * 2
    batch = completions_to_batch(
        prompts(), completions, 4, pad_token_id=1, calculate_log_probs=False
    )
    assert "rollout_log_probs" not in batch.batch.keys()  # noqa: SIM118


def test_what_does_not_fit_is_refused() -> None:
    one = Completion([2] * 5, [-0.5] * 5, "length", 0)
    with pytest.raises(ProtocolError, match="2 prompts, but 1 completions"):
        completions_to_batch(prompts(), [one], 8, 1, True)
    with pytest.raises(ProtocolError, match="completion 0 has 5 tokens, the batch has room for 4"):
        completions_to_batch(prompts(), [one, one], 4, 1, True)
    with pytest.raises(ProtocolError, match="needs the tensor 'input_ids'"):
        empty = DataProto.from_dict(tensors={"x": torch.zeros(1)})
        completions_to_batch(empty, [one], 8, 1, True)


STOPS = {"stop_token_ids": [7, 2], "stop": ["ab", "\n"]}
PENALTIES: dict[str, Any] = {
    "min_p": 0.1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2
}  # fmt: skip


def test_stops_and_penalties_reach_the_requests(config: MakeConfig) -> None:
    settings = config(**STOPS, **PENALTIES)
    params = requests_from_batch(prompts(), settings, [2], seeds=[0, 1])[0].params
    assert {name: getattr(params, name) for name in PENALTIES} == PENALTIES
    assert (params.stop_token_ids, params.stop) == (frozenset({2, 7}), ("ab", "\n"))


def test_validation_has_penalties_of_its_own_and_the_same_stops(config: MakeConfig) -> None:
    settings = config(**STOPS, **PENALTIES, val_kwargs=ValKwargs(presence_penalty=0.9))
    batch = prompts(validate=True)
    params = requests_from_batch(batch, settings, [2], seeds=[0, 1])[0].params
    assert (params.min_p, params.repetition_penalty, params.frequency_penalty) == (0, 1, 0)
    assert params.presence_penalty == 0.9
    assert (params.stop_token_ids, params.stop) == (frozenset({2, 7}), ("ab", "\n"))
    settings = config(val_kwargs=ValKwargs(**PENALTIES))
    params = requests_from_batch(batch, settings, [2], seeds=[0, 1])[0].params
    assert {name: getattr(params, name) for name in PENALTIES} == PENALTIES


@pytest.mark.parametrize("name", ["native", "hf"])
def test_a_run_with_stops_samples_up_to_them(
    name: str, llama: PreTrainedModel, config: MakeConfig
) -> None:
    """From the config's keys to the padded answers and their mask."""
    plain = config(response_length=12, do_sample=False)
    rollout = ROLLOUTS[name](plain, llama, torch.device("cpu"))
    free = rollout.generate(requests_from_batch(prompts(), plain, [], seeds=[0, 1]))
    rollout.decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
    by_token, by_text = free[0].token_ids[2], f"{free[1].token_ids[3]}><{free[1].token_ids[4]}"
    settings = config(
        response_length=12, do_sample=False, stop_token_ids=[by_token], stop=[by_text]
    )
    stopped = rollout.generate(requests_from_batch(prompts(), settings, [], seeds=[0, 1]))
    ends = [free[0].token_ids.index(by_token) + 1, 5]
    assert by_token not in free[1].token_ids[:5], "pick another model"
    assert [one.finish_reason for one in stopped] == ["stop", "stop"]
    batch = completions_to_batch(prompts(), stopped, 12, 0, calculate_log_probs=True).batch
    for row, end in enumerate(ends):
        assert batch["responses"][row].tolist() == free[row].token_ids[:end] + [0] * (12 - end)
        assert batch["response_mask"][row].tolist() == [1] * end + [0] * (12 - end)
        assert batch["rollout_log_probs"][row, :end].all()


def test_a_run_with_penalties_samples_with_them(llama: PreTrainedModel, config: MakeConfig) -> None:
    rollout = NativeRollout(config(), llama, torch.device("cpu"))
    settings = config(response_length=20, do_sample=False, presence_penalty=1e4)
    for one in rollout.generate(requests_from_batch(prompts(), settings, [], seeds=[0, 1])):
        assert len(set(one.token_ids)) == 20
    narrow = config(response_length=20, min_p=1.0)  # leaves the most likely token alone
    drawn = rollout.generate(requests_from_batch(prompts(), narrow, [], seeds=[0, 1]))
    greedy = config(response_length=20, do_sample=False)
    likely = rollout.generate(requests_from_batch(prompts(), greedy, [], seeds=[0, 1]))
    assert [one.token_ids for one in drawn] == [one.token_ids for one in likely]
    assert drawn[0].log_probs == [0.0] * 20


@pytest.mark.parametrize("keys", [PENALTIES, STOPS])
def test_every_sampler_is_handed_all_of_them(keys: Any, config: MakeConfig) -> None:
    """What goes to an engine's process and to a remote server has each key that is set."""
    settings = config(**keys)
    request = requests_from_batch(prompts(), settings, [2], seeds=[0, 1])[0]
    expected = {**keys, **({"stop_token_ids": [2, 7]} if keys is STOPS else {})}
    engine = params_as_message(request.params, 5)
    server = remote_body("m", request)
    # An engine gets tokens alone: its strings are looked for beside it, as `test_engines` shows.
    assert {name: engine[name] for name in expected if name != "stop"} == {
        name: value for name, value in expected.items() if name != "stop"
    }
    assert {name: server[name] for name in expected} == expected


def test_engines_sample_with_all_of_them(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters as vLLM and SGLang call them, made of the message that reaches them."""
    settings = config(**PENALTIES, **STOPS)
    request = requests_from_batch(prompts(), settings, [2], seeds=[0, 1])[0]
    message = params_as_message(request.params, 5)
    kinds: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": dict}, "vllm.sampling_params": {"RequestOutputKind": Kind}
    }  # fmt: skip
    for name, content in kinds.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    expected = PENALTIES | {"stop_token_ids": [2, 7]}
    vllm = vllm_engine._sampling_params(message, 0)
    assert {name: vllm[name] for name in expected} == expected
    del expected["repetition_penalty"]  # the config refuses it with SGLang
    sglang = sglang_engine._sampling_params(message)
    assert {name: sglang[name] for name in expected} == expected


class Kind:
    DELTA = "delta"
