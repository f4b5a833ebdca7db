"""What an engine is told, by the strategy of its role."""

from __future__ import annotations

import pytest
import torch

from caldera.config import ActorConfig, FSDPConfig, MegatronConfig, OptimizerConfig
from caldera.workers.building import largest_norm, memory_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("strategy", ["local", "fsdp", "fsdp2"])
def test_other_strategies_have_their_own_keys(strategy: str) -> None:
    memory = FSDPConfig(seed=3)
    assert memory_of(strategy, memory, MegatronConfig(seed=4), CPU) is memory


def test_megatrons_keys_say_the_same_in_other_words() -> None:
    keys = MegatronConfig(dtype="bfloat16", seed=4, param_offload=True, optimizer_offload=True)
    told = memory_of("megatron", FSDPConfig(seed=3), keys, CPU)
    assert told == FSDPConfig(
        param_offload=True, optimizer_offload=True, model_dtype="bf16", dtype="bfloat16", seed=4,
        use_torch_compile=False,
    )  # fmt: skip


@pytest.mark.parametrize(("device", "dtype"), [(CPU, "float32"), (CUDA, "bfloat16")])
def test_a_precision_that_nobody_has_chosen(device: torch.device, dtype: str) -> None:
    assert memory_of("megatron", FSDPConfig(), MegatronConfig(), device).dtype == dtype


def test_the_bound_of_the_gradient_norm() -> None:
    optim = OptimizerConfig(clip_grad=0.5)
    assert largest_norm(ActorConfig(strategy="fsdp", grad_clip=2.0, optim=optim)) == 2.0
    assert largest_norm(ActorConfig(strategy="megatron", grad_clip=2.0, optim=optim)) == 0.5
