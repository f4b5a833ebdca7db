"""Two ranks that sample together sample what one does.

Two processes are started once. Both do everything below, the first of them also alone, and what
they found out is read by the tests.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

from caldera.config import RolloutConfig
from caldera.errors import ConfigError, RolloutError, UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.models.pretrained import take_values
from caldera.rollout import AsyncSampler, Completion, NativeRollout, Request, SamplingParams
from caldera.rollout.native.parallel.engine import (
    FIRST_PART,
    Order,
    TensorParallelRollout,
    in_parts,
    read_parts,
)
from caldera.rollout.native.parallel.sharding import planned_layers
from caldera.rollout.native.steps import Decode, Prefill, Step
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.timeout(240)  # the first test waits for all that the processes do
CPU = torch.device("cpu")
SHORT_S = 3.0
"""How long a rank waits for another, where one is going to wait in vain."""
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=7, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "chunks and prefixes": {
        "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 24,
    },
    "little cache": {"kv_cache_blocks": 8},
    "few rows": {"max_num_seqs": 3},
}  # fmt: skip
Result = dict[str, Any]
Told = list[tuple[list[int], list[float]]]


def build(family: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module: nn.Module = AutoModelForCausalLM.from_config(
        FAMILIES[family], attn_implementation=ATTENTION
    )
    with torch.no_grad():  # biases begin at 0, which would hide one that is added twice
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return module


def empty(family: str) -> nn.Module:
    module = build(family)
    take_values(module)
    return module


def config(ranks: int = 1, **keys: Any) -> RolloutConfig:
    return RolloutConfig(max_model_len=128, tensor_model_parallel_size=ranks, **keys)


def requests(temperature: float, count: int = 10) -> list[Request]:
    """Prompts of several lengths; two requests have the same one."""
    params = SamplingParams(max_tokens=14, temperature=temperature, stop_token_ids=frozenset([7]))
    prompts = [[(7 * i + j) % 47 + 1 for j in range(1 + 6 * i)] for i in range(count // 2)]
    return [Request(prompts[i // 2], params, seed=i) for i in range(count)]


def told(completions: list[Completion]) -> Told:
    return [(each.token_ids, each.log_probs) for each in completions]


def alone(family: str, seed: int = 0, **keys: Any) -> NativeRollout:
    return NativeRollout(config(**keys), build(family, seed), CPU)


def together(family: str, timeout_s: float = 60.0, **keys: Any) -> TensorParallelRollout:
    rollout = TensorParallelRollout.join(config(2, **keys), empty(family), CPU, timeout_s)
    rollout.load_weights(build(family).state_dict().items(), version=1)
    return rollout


class Delayed(TensorParallelRollout):
    """The tokens of a step are looked at when the next one has begun, as on CUDA."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._runner.max_steps_in_flight = 1


def sample(rollout: TensorParallelRollout, asked: list[Request]) -> Told | None:
    """What the first rank is told; the other follows."""
    rollout.wake_up()
    try:
        if rollout.leads:
            with rollout.leading():
                return told(rollout.generate(asked))
        rollout.follow()
        return None
    finally:
        rollout.sleep()


# ---------------------------------------------------------------------- what a rank does


def sample_families(found: Result) -> None:
    for family in FAMILIES:
        rollout = together(family)
        for temperature in (0.0, 0.9):
            case = f"{family} at {temperature}"
            found[case] = sample(rollout, requests(temperature))
            found[f"{case}, alone"] = told(alone(family).generate(requests(temperature)))
        found[f"{family} parameters"] = {
            name: tuple(parameter.shape) for name, parameter in rollout.module.named_parameters()
        }


def sample_cases(found: Result) -> None:
    for case, keys in CASES.items():
        found[case] = sample(together("llama", **keys), requests(0.9))
        found[f"{case}, alone"] = told(alone("llama", **keys).generate(requests(0.9)))
    delayed = Delayed.join(config(2), empty("llama"), CPU, 60.0)
    delayed.load_weights(build("llama").state_dict().items(), version=1)
    found["delayed"] = sample(delayed, requests(0.9))
    found["delayed, alone"] = told(alone("llama").generate(requests(0.9)))


def sample_with_new_weights(found: Result) -> None:
    rollout = together("qwen2")
    sample(rollout, requests(0.9))
    rollout.load_weights(build("qwen2", 1).state_dict().items(), version=2)
    found["new weights"] = sample(rollout, requests(0.9))
    found["new weights, alone"] = told(alone("qwen2", 1).generate(requests(0.9)))


async def serve(rollout: NativeRollout) -> Told:
    """Requests that come one by one: the cache grows while it is in use."""
    async with AsyncSampler(rollout) as sampler:
        tasks = []
        for request in requests(0.9):
            tasks.append(asyncio.create_task(sampler.generate(request)))
            await asyncio.sleep(0.002)
        return told(list(await asyncio.gather(*tasks)))


def sample_asynchronously(found: Result) -> None:
    rollout = together("llama")
    if rollout.leads:
        with rollout.leading():
            found["service"] = asyncio.run(serve(rollout))
            found["cache"] = rollout.cache_bytes
        single = alone("llama")
        found["service, alone"] = told(single.generate(requests(0.9)))
        found["cache of one"] = single._cache_shape.page_bytes
    else:
        rollout.follow()
    found["page"] = rollout._cache_shape.page_bytes
    found["held"] = rollout.cache_bytes
    rollout.sleep()
    found["held asleep"] = rollout.cache_bytes


def fail_in_the_first(found: Result) -> None:
    """What the first rank is asked for fails; afterwards both sample as ever."""
    rollout = together("llama")

    def fail(place: int, completion: Completion) -> None:
        raise KeyError("of a scorer")

    if rollout.leads:
        with pytest.raises(KeyError, match="of a scorer"), rollout.leading():
            rollout.generate(requests(0.0), fail)
    else:
        rollout.follow()
        assert rollout.cache_bytes == 0
    found["after a failure"] = sample(rollout, requests(0.0))
    found["after a failure, alone"] = told(alone("llama").generate(requests(0.0)))


def fail_in_the_second(found: Result, between: bool) -> None:
    """The other rank fails within a step, or after its last sum."""
    rollout = together("llama", SHORT_S)
    if rollout.leads:
        with pytest.raises(RolloutError) as raised, rollout.leading():
            rollout.generate(requests(0.9))
        found[f"failure, {between}"] = str(raised.value)
        return
    runs: list[Any] = []
    run = rollout._runner.run

    def fail(*given: Any, **named: Any) -> Any:
        runs.append(run(*given, **named) if between or len(runs) < 3 else None)
        if len(runs) > 3:
            raise ValueError("no third step")
        return runs[-1]

    rollout._runner.run = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no third step"):
        rollout.follow()


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    found: Result = {}
    with pytest.raises(ConfigError) as raised:
        TensorParallelRollout.join(config(3), empty("llama"), CPU, 60.0)
    found["three"] = str(raised.value)
    sample_families(found)
    sample_cases(found)
    sample_with_new_weights(found)
    sample_asynchronously(found)
    fail_in_the_first(found)
    fail_in_the_second(found, between=True)
    dist.barrier()
    fail_in_the_second(found, between=False)
    dist.barrier()
    dist.destroy_process_group()
    torch.save(found, folder / f"found_{rank}.pt")


# ---------------------------------------------------------------------- what is found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run_ranks(__file__, 2, tmp_path_factory.mktemp("ranks"), "caldera.rollout")


def assert_same(ours: Told, reference: Told) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in reference]
    assert len({tuple(tokens) for tokens, _ in ours}) > len(ours) // 3, "they say something"
    for (_, one), (_, other) in zip(ours, reference, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_sample_what_one_does(
    found: list[Result], family: str, temperature: float
) -> None:
    case = f"{family} at {temperature}"
    assert_same(found[0][case], found[0][f"{case}, alone"])


@pytest.mark.parametrize("case", [*CASES, "delayed", "new weights", "service", "after a failure"])
def test_whatever_they_are_asked_for(found: list[Result], case: str) -> None:
    assert_same(found[0][case], found[0][f"{case}, alone"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_has_half_of_every_matrix(found: list[Result], family: str) -> None:
    whole = {name: parameter.shape for name, parameter in build(family).named_parameters()}
    for rank in found:
        parts: dict[str, tuple[int, ...]] = rank[f"{family} parameters"]
        assert parts.keys() == whole.keys()
        for name, shape in parts.items():
            is_cut = "layers" in name and len(shape) == 2
            assert np.prod(shape) * (2 if is_cut else 1) == whole[name].numel() or "bias" in name


def test_the_cache_is_shared_too(found: list[Result]) -> None:
    first, second = found
    assert first["page"] == second["page"] == first["cache of one"] // 2
    assert first["cache"] == first["held"] == second["held"] > 0
    assert first["held asleep"] == second["held asleep"] == 0


@pytest.mark.parametrize("between", [False, True])
def test_the_first_rank_tells_what_another_has_raised(found: list[Result], between: bool) -> None:
    expected = "rank 1, which samples with this one, failed: ValueError: no third step"
    assert found[0][f"failure, {between}"] == expected


def test_ranks_come_in_whole_groups(found: list[Result]) -> None:
    for rank in found:
        assert rank["three"] == (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=3 does not divide the 2 ranks"
        )


# ---------------------------------------------------------------------- without processes


def steps() -> list[Step]:
    def some(*shape: int) -> Any:
        return np.random.default_rng(len(shape)).integers(-1, 2**31 - 1, shape)

    packed = Prefill(
        rows=some(3), token_ids=some(9), slots=some(9), run=some(2), counts=some(2), ends=some(2),
        tables=some(2, 4), leaders=some(3), page_copies=some(0, 2),
        tables_of_rows=some(3, FIRST_PART),
    )  # fmt: skip
    return [packed, Decode(some(5), some(5), some(5), some(5), some(5, 7))]


@pytest.mark.parametrize("step", steps(), ids=lambda step: type(step).__name__)
def test_a_step_that_was_sent(step: Step) -> None:
    parts = in_parts(Order.STEP, (step,))
    assert len(parts[0]) == FIRST_PART and len(parts) == 1 + isinstance(step, Prefill)
    order, (copy,) = read_parts(torch.cat(parts))
    assert order is Order.STEP
    assert type(copy) is type(step)
    for name, value in vars(step).items():
        np.testing.assert_array_equal(getattr(copy, name), value, err_msg=name)


def refusal(kind: type[PretrainedConfig], ranks: int, **sizes: Any) -> str:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(kind(**{**SIZES, **sizes}))
    with pytest.raises(UnsupportedError) as raised:
        planned_layers(module, ranks)
    return str(raised.value)


def test_models_that_cannot_be_shared() -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    told = refusal(LlamaConfig, 4)
    assert told == f"{key}=4 does not divide the model's num_key_value_heads=2; takes 1, 2"
    told = refusal(LlamaConfig, 2, intermediate_size=63)
    assert told == f"{key}=2 does not divide the model's intermediate_size=63; takes 1"
    told = refusal(GPT2Config, 2)
    assert told.startswith(f"{key}=2: the config of GPT2LMHeadModel has no plan for it")
    told = refusal(Phi3Config, 2)
    assert told.startswith(
        f"{key}=2: Phi3ForCausalLM cuts layers.0.self_attn.o_proj, a Linear, by "
        "'rowwise_split_input'; takes"
    )


if __name__ == "rank":
    run_rank(RANK, FOLDER)  # type: ignore[name-defined]  # noqa: F821  # given by the parent
