"""SGLang with the weights of a model that has an adapter: what goes over, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from caldera.config import RolloutConfig
from caldera.errors import RolloutError
from caldera.models.attention import ATTENTION
from caldera.models.forward import without_adapter
from caldera.rollout import ROLLOUTS, Completion, Request, SamplingParams
from caldera.rollout.engines.rollout import EngineRollout
from caldera.rollout.engines.weights import ModuleWeights
from caldera.rollout.weights import probe_module
from tests.engine_trials import (
    CPU,
    LENGTHS,
    assert_same,
    change_adapter,
    native,
    note_orders,
    python_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """With queries, keys and values of different widths, and a scale that is not 1."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=192,
        initializer_range=0.2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules="all-linear")
    made: torch.nn.Module = peft.get_peft_model(plain, lora).eval()
    return made


@pytest.fixture(scope="module")
def rollout(model: torch.nn.Module) -> Iterator[EngineRollout]:
    config = RolloutConfig(
        name="sglang", engine_python=python_of("sglang"), max_num_seqs=2,
        enable_prefix_caching=True, **LENGTHS,
    )  # fmt: skip
    made = ROLLOUTS["sglang"](config, model, CPU)
    assert isinstance(made, EngineRollout)
    yield made
    made.close()


def requests(count: int = 4) -> list[Request]:
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    return [Request([5 + n, 6, 7 + n], params, n) for n in range(count)]


def test_weights_come_with_the_adapter(
    rollout: EngineRollout, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = note_orders(monkeypatch)
    for version in (1, 2):
        change_adapter(model, rollout, version)
        expected = native(model, requests())
        assert_same(rollout.generate(requests()), expected, version)
    with without_adapter(model):
        assert native(model, requests())[0].token_ids != expected[0].token_ids
    told = [each.what for each in orders]
    assert [what for what in told if what in ("load_bucket", "use_weights", "score")] == [
        "load_bucket", "use_weights", "score",
    ] * 2  # fmt: skip


def test_requests_in_flight_go_on_with_the_next(
    rollout: EngineRollout, model: torch.nn.Module
) -> None:
    """Those that run, and those that wait for a place."""
    found: dict[int, Completion] = {}
    numbers = [rollout.add(each, None, found.__setitem__) for each in requests(6)]
    states = [rollout._requests[number] for number in numbers]
    with rollout.stepping():
        while not any(state.token_ids for state in states):
            rollout.step()
        change_adapter(model, rollout, 3)
        while rollout.has_work():
            rollout.step()
    versions = [set(found[number].token_versions()) for number in numbers]
    assert {2, 3} in versions and {3} in versions
    fresh = [found[n] for n, its in zip(numbers, versions, strict=True) if its == {3}]
    asked = [r for r, its in zip(requests(6), versions, strict=True) if its == {3}]
    assert_same(fresh, native(model, asked), 3)


def test_another_adapter_than_the_trainers_is_found_out(
    rollout: EngineRollout, model: torch.nn.Module
) -> None:
    change_adapter(model, rollout, 5)
    with without_adapter(model):
        rollout.expect(probe_module(model, CPU, 64))
    with pytest.raises(RolloutError, match="No sample was drawn"):
        rollout.generate(requests())
    change_adapter(model, rollout, 6)
    assert_same(rollout.generate(requests()), native(model, requests()), 6)


def test_weights_without_an_adapter(rollout: EngineRollout, model: torch.nn.Module) -> None:
    base = ModuleWeights(model).export_weights(merged=False)
    rollout.load_weights(base, version=7)
    with without_adapter(model):
        rollout.expect(probe_module(model, CPU, 64))
        assert_same(rollout.generate(requests(2)), native(model, requests(2)), 7)
    change_adapter(model, rollout, 8)
    assert_same(rollout.generate(requests(2)), native(model, requests(2)), 8)
