"""Two engines of vLLM with an adapter: what goes over, and what a death costs."""

from __future__ import annotations

import logging
import os
import signal
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
from caldera.rollout.weights import probe_module
from tests.engine_trials import (
    CPU,
    LENGTHS,
    Order,
    assert_same,
    change_adapter,
    native,
    note_orders,
    python_of,
    spoil_adapter,
)

pytestmark = pytest.mark.slow
RANK = 3  # vLLM's kernels have another


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=199, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=192,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear")
    made: torch.nn.Module = peft.get_peft_model(plain, lora).eval()
    return made


@pytest.fixture(scope="module")
def rollout(model: torch.nn.Module) -> Iterator[EngineRollout]:
    config = RolloutConfig(
        name="vllm", engine_python=python_of("vllm"), data_parallel_size=2, max_num_seqs=16,
        enable_prefix_caching=True, multi_stage_wake_up=True, **LENGTHS,
    )  # fmt: skip
    made = ROLLOUTS["vllm"](config, model, CPU)
    assert isinstance(made, EngineRollout)
    yield made
    made.close()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    return note_orders(monkeypatch)


def told(orders: list[Order], pid: int) -> list[str]:
    return [
        each.what if each.what != "wake_up" else f"wake {each.arguments['part']}"
        for each in orders
        if each.pid == pid
    ]


def requests(count: int = 4) -> list[Request]:
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    return [Request([5 + n, 6, 7 + n], params, n, session="ab"[n % 2]) for n in range(count)]


def test_the_adapter_alone_goes_over(
    rollout: EngineRollout, model: torch.nn.Module, orders: list[Order]
) -> None:
    for version in (1, 2):
        change_adapter(model, rollout, version)
        expected = native(model, requests())
        assert_same(rollout.generate(requests()), expected, version)
    with without_adapter(model):
        assert native(model, requests())[0].token_ids != expected[0].token_ids
    for pid in rollout.pids:
        assert told(orders, pid) == ["load_bucket", "use_weights", "score", "use_weights", "score"]


def test_another_adapter_than_the_trainers_is_found_out(
    rollout: EngineRollout, model: torch.nn.Module
) -> None:
    change_adapter(model, rollout, 3)
    spoil_adapter(rollout)
    with pytest.raises(RolloutError, match="checksum"):
        rollout.generate(requests())
    change_adapter(model, rollout, 4)
    other = probe_module(model, CPU, 64)
    with without_adapter(model):
        rollout.expect(probe_module(model, CPU, 64))
    with pytest.raises(RolloutError, match="No sample was drawn"):
        rollout.generate(requests())
    change_adapter(model, rollout, 4)
    rollout.expect(other)
    assert_same(rollout.generate(requests()), native(model, requests()), 4)


def test_weights_come_before_the_cache(
    rollout: EngineRollout, model: torch.nn.Module, orders: list[Order]
) -> None:
    rollout.sleep()
    change_adapter(model, rollout, 5)
    rollout.wake_up()
    assert_same(rollout.generate(requests()), native(model, requests()), 5)
    assert told(orders, rollout.pids[0]) == [
        "sleep", "wake weights", "use_weights", "wake kv_cache", "score",
    ]  # fmt: skip


def test_one_of_two_is_killed(
    rollout: EngineRollout, model: torch.nn.Module, orders: list[Order],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Nothing is lost, the other goes on, and sessions stay where they are."""
    asked, found = requests(8), dict[int, Completion]()
    numbers = [rollout.add(each, None, found.__setitem__) for each in asked]
    before = list(rollout.pids)
    with rollout.stepping(), caplog.at_level(logging.WARNING):
        rollout.step()
        homes = sessions(rollout)
        assert sorted(homes.values()) == [0, 1]
        os.kill(before[0], signal.SIGKILL)
        while rollout.has_work():
            rollout.step()
    assert_same([found[number] for number in numbers], native(model, asked), 5)
    assert rollout.restarts == 1 and "requests that go on: 4, lost: 0" in caplog.text
    after = rollout.pids
    assert after[0] != before[0] and after[1] == before[1]
    assert set(told(orders, after[0])) == {"load_bucket", "use_weights", "score"}
    assert not told(orders, after[1])
    again = [rollout.add(each) for each in asked[:2]]
    with rollout.stepping():
        rollout.step()
    assert sessions(rollout) == homes
    for number in again:
        rollout.abort(number)


def sessions(rollout: EngineRollout) -> dict[str | None, int]:
    return {state.request.session: state.replica for state in rollout._in_engine.values()}
