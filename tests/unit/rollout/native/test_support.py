"""Models and requests that the sampler cannot serve are refused, and nobody else suffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DiffLlamaConfig,
    DogeConfig,
    GPT2Config,
    JambaConfig,
    ModernBertDecoderConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)

from caldera.config import RolloutConfig
from caldera.config.rollout import NativeRolloutConfig
from caldera.errors import RolloutError, UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.rollout import NativeRollout, Request, SamplingParams

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}  # fmt: skip
PHI3 = Phi3Config(**SIZES, rope_parameters=LONG, original_max_position_embeddings=100)
GPT2 = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=100)


def build(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4),
         "BloomForCausalLM does not use the attention interface of transformers"),
        (Qwen3NextConfig(**SIZES, **EXPERTS), "does not use the attention interface"),
        (JambaConfig(**SIZES, num_experts=2), "does not use the attention interface"),
        (DiffLlamaConfig(**SIZES), r"2 layers, .* in this order: \[0, 0, 1, 1\]; takes each"),
        (DogeConfig(**SIZES), "DogeAttention needs a mask of its own"),
        (PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=8),
         "sliding_window=8: not supported; takes null"),
        (ModernBertDecoderConfig(**SIZES, decoder_bias=False, cls_token_id=1, sep_token_id=2),
         r"more than a matrix between .*\(lm_head.dense.weight"),
        (PHI3, r"max_model_len=128: the rotary embedding \(longrope\) of Phi3ForCausalLM is "
               "another one beyond that; takes at most 100"),
        (GPT2, "max_model_len=128: GPT2LMHeadModel has learned no more positions; .* most 100"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)  # fmt: skip
def test_models_that_would_be_sampled_wrongly(
    config: PretrainedConfig, said: str, make_requests: Any
) -> None:
    keys = RolloutConfig(prompt_length=64, response_length=64)
    with pytest.raises(UnsupportedError, match=said):
        NativeRollout(keys, build(config), CPU).generate(make_requests([5]))


@pytest.mark.parametrize("model", [PHI3, GPT2], ids=["longrope", "learned positions"])
def test_up_to_where_a_model_stays_the_same_it_is_sampled_from(
    model: PretrainedConfig, config: Any, make_requests: Any
) -> None:
    rollout = NativeRollout(config(max_model_len=100), build(model), CPU)
    requests = make_requests([5, 60], max_tokens=40)
    together = rollout.generate(requests)
    assert [each.token_ids for each in together] == [
        rollout.generate([request])[0].token_ids for request in requests
    ]


def test_exact_mode_refuses_experts(config: Any) -> None:
    module = build(Qwen2MoeConfig(**SIZES, **EXPERTS))
    with pytest.raises(UnsupportedError, match=r"no exact form of products by .*experts"):
        NativeRollout(config(native=NativeRolloutConfig(exact=True)), module, CPU)


@pytest.mark.parametrize("tokens", [[-1, 3], [48], [2**40]])
def test_tokens_that_the_model_has_not(tokens: list[int], llama: Any, config: Any) -> None:
    rollout = NativeRollout(config(), llama, CPU)
    with pytest.raises(RolloutError, match="the model has 0 to 47"):
        rollout.generate([Request(tokens, SamplingParams(4), 0)])
    assert not rollout.has_work()
    assert len(rollout.generate([Request([3], SamplingParams(4), 0)])[0].token_ids) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-40), ("temperature", float("nan")), ("temperature", float("inf")),
        ("presence_penalty", float("nan")), ("frequency_penalty", float("inf")),
        ("repetition_penalty", float("inf")), ("top_p", float("nan")),
    ],
)  # fmt: skip
def test_numbers_that_are_none(name: str, value: float) -> None:
    number: dict[str, Any] = {name: value}
    with pytest.raises(RolloutError, match=f"{name}=.*cannot be honoured: takes "):
        SamplingParams(4, **number)


def test_an_adapter_that_is_switched_off(build_model: Any, config: Any, make_requests: Any) -> None:
    plain = build_model("llama")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    module = peft.get_peft_model(build_model("llama"), lora)
    rollout = NativeRollout(config(), module, CPU)
    requests = make_requests([5, 9], temperature=0.0)

    def sampled() -> list[list[int]]:
        return [each.token_ids for each in rollout.generate(requests)]

    adapted = sampled()
    with module.disable_adapter():
        without = sampled()
    expected = NativeRollout(config(), plain, CPU).generate(requests)
    assert without == [each.token_ids for each in expected]
    assert sampled() == adapted != without


def test_weights_whose_rows_change_places(build_model: Any, config: Any) -> None:
    """The sum of all bits stays as it was."""
    module = build_model("llama")
    rollout = NativeRollout(config(), module, CPU)
    request = Request([3, 4, 5], SamplingParams(8, temperature=0.0), 0)
    rollout.generate([request])
    changed = {name: value.clone() for name, value in module.state_dict().items()}
    name = "model.layers.0.mlp.down_proj.weight"  # of which the runner has a copy
    changed[name] = changed[name][np.random.default_rng(0).permutation(len(changed[name]))]
    rollout.load_weights(changed.items(), version=1)
    module = build_model("llama")
    module.load_state_dict(changed)
    expected = NativeRollout(config(), module, CPU).generate([replace(request)])
    assert rollout.generate([request])[0].token_ids == expected[0].token_ids
