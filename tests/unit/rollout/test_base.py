from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from caldera.errors import RegistryError, RolloutError
from caldera.rollout import ROLLOUTS, HFRollout, NativeRollout, Request, SamplingParams

if TYPE_CHECKING:
    from tests.unit.rollout.conftest import BuildModel, MakeConfig, MakeRequests

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "hf"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_samplers_are_found_by_name() -> None:
    assert ROLLOUTS.names() == ["hf", "native", "remote", "sglang", "vllm"]
    assert ROLLOUTS["native"] is NativeRollout
    assert ROLLOUTS["hf"] is HFRollout
    with pytest.raises(RegistryError, match="hf, native"):
        ROLLOUTS["trtllm"]


def test_load_weights_copies_in_place(
    name: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    module, other = build_model(seed=0), build_model(seed=1)
    storage = module.model.embed_tokens.weight.data_ptr()
    rollout = ROLLOUTS[name](config(), module, CPU)
    requests = make_requests([5], temperature=0.0)
    before = rollout.generate(requests)[0]
    rollout.load_weights(other.state_dict().items(), version=7)
    after = rollout.generate(requests)[0]
    assert (before.weight_version, after.weight_version) == (0, 7)
    assert module.model.embed_tokens.weight.data_ptr() == storage
    assert after.token_ids == ROLLOUTS[name](config(), other, CPU).generate(requests)[0].token_ids
    assert after.token_ids != before.token_ids


def test_a_tied_weight_may_come_under_one_name(build_model: BuildModel, config: MakeConfig) -> None:
    module, other = build_model("qwen2", seed=0), build_model("qwen2", seed=1)
    rollout = NativeRollout(config(), module, CPU)
    rollout.load_weights(dict(other.named_parameters()).items(), version=1)
    assert torch.equal(module.lm_head.weight, other.model.embed_tokens.weight)


def test_load_weights_names_what_does_not_fit(build_model: BuildModel, config: MakeConfig) -> None:
    module = build_model()
    rollout = NativeRollout(config(), module, CPU)
    weights = dict(module.state_dict())
    weights["extra.weight"] = weights.pop("model.norm.weight")
    with pytest.raises(RolloutError, match=r"missing model.norm.weight; unexpected extra.weight"):
        rollout.load_weights(weights.items(), version=1)
    assert rollout.version == 0
    with pytest.raises(RolloutError, match=r"'lm_head.weight' has shape \(1,\).*\(48, 32\)"):
        rollout.load_weights([("lm_head.weight", torch.ones(1))], version=1)


def test_the_module_keeps_its_modes_and_gradients(
    name: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    module = build_model()
    module.train()
    module.model.norm.eval()
    rollout = ROLLOUTS[name](config(), module, CPU)
    rollout.version = 3
    completion = rollout.generate(make_requests([4]))[0]
    assert completion.weight_version == 3
    assert module.training and module.model.layers[0].training
    assert not module.model.norm.training
    assert all(p.requires_grad and not p.is_inference() for p in module.parameters())


def test_dropout_is_off_while_sampling(
    name: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    class Dropping(nn.Module):
        def forward(self, x: Any) -> Any:
            assert not self.training
            return x

    module = build_model()
    module.model.norm = nn.Sequential(module.model.norm, Dropping())
    module.train()
    ROLLOUTS[name](config(), module, CPU).generate(make_requests([4]))


def test_a_request_that_is_too_long_is_refused_with_the_numbers(
    name: str, llama: PreTrainedModel, config: MakeConfig
) -> None:
    rollout = ROLLOUTS[name](config(max_model_len=20), llama, CPU)
    fine = Request([1] * 12, SamplingParams(8), 0)
    long = Request([1] * 13, SamplingParams(8), 0)
    with pytest.raises(RolloutError, match=r"request 1 .*13 .*8 new tokens = 21.*max_model_len=20"):
        rollout.generate([fine, long])
    for empty in (Request([], SamplingParams(8), 0), Request([1], SamplingParams(0), 0)):
        with pytest.raises(RolloutError, match="at least 1"):
            rollout.generate([empty])


def test_no_requests_no_completions(name: str, llama: PreTrainedModel, config: MakeConfig) -> None:
    assert ROLLOUTS[name](config(), llama, CPU).generate([]) == []


def test_sampling_through_lora_adapters(
    name: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    module = peft.get_peft_model(build_model(), lora)
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(0, 0.5)
    requests = make_requests([5, 9], temperature=0.0)
    adapted = ROLLOUTS[name](config(), module, CPU).generate(requests)
    merged = NativeRollout(config(), module.merge_and_unload(), CPU).generate(requests)
    plain = NativeRollout(config(), build_model(), CPU).generate(requests)
    assert [c.token_ids for c in adapted] == [c.token_ids for c in merged]
    assert [c.token_ids for c in adapted] != [c.token_ids for c in plain]


def test_another_precision_leaves_the_parameters_alone(
    name: str, build_model: BuildModel, config: MakeConfig, make_requests: MakeRequests
) -> None:
    module = build_model()
    requests = make_requests([5, 17])
    exact = ROLLOUTS[name](config(), module, CPU).generate(requests)
    rounded = ROLLOUTS[name](config(dtype="bfloat16"), module, CPU).generate(requests)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    first = [completion.log_probs[0] for completion in exact]
    assert [c.log_probs[0] for c in rounded] != first
    assert all(len(completion.token_ids) == 12 for completion in rounded)
