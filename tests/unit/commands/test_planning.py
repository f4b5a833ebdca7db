"""`caldera plan`, from the command line to its verdict."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from caldera.cli import main
from caldera.commands.plan import _config
from caldera.commands.plan_report import _size
from caldera.commands.planning import GIB, Plan, device_bytes, make_plan
from caldera.errors import ConfigError, UnsupportedError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")
STEP = (
    "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16",
    "data.max_prompt_length=512", "data.max_response_length=512",
    f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
    *GRPO,
)  # fmt: skip


@pytest.fixture(scope="module")
def half_b(config_folder: Callable[..., str]) -> str:
    return config_folder("0.5B")


@pytest.fixture
def planned(half_b: str) -> Callable[..., Plan]:
    def plan(*changes: str, device: str = "h200") -> Plan:
        path = f"actor_rollout_ref.model.path={half_b}"
        config = _config([path, *STEP, *changes], "ppo_trainer", None)
        return make_plan(config, device_bytes(device))

    return plan


def phases(plan: Plan) -> dict[str, int]:
    return {phase.name: phase.peak for phase in plan.phases}


def test_the_batches_of_a_step(planned: Callable[..., Plan]) -> None:
    step = planned("trainer.n_gpus_per_node=4", f"{ACTOR}.ppo_epochs=2").batches
    assert (step.samples, step.samples_a_rank, step.optimizer_steps) == (512, 128, 8)
    assert (step.update.rows, step.update.together, step.update.micro_batches) == (32, 16, 2)
    assert (step.log_prob.rows, step.log_prob.micro_batches) == (128, 8)
    assert step.update.largest.tokens == 16384
    assert step.update.largest.predicted == 8192


def test_micro_batches_by_samples(planned: Callable[..., Plan]) -> None:
    keys = (
        f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
    )  # fmt: skip
    step = planned(*keys).batches
    assert (step.update.micro_batches, step.log_prob.micro_batches) == (43, 103)


def test_ranks_that_share_sequences(planned: Callable[..., Plan]) -> None:
    shared = planned("trainer.n_gpus_per_node=4", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    step = shared.batches
    assert (step.copies, step.update.rows, step.update.together) == (2, 64, 32)
    assert step.update.largest.tokens == 16384


def test_models_that_join_in(planned: Callable[..., Plan]) -> None:
    alone = planned()
    assert list(phases(alone)) == ["rollout", "log-prob", "update"]
    kl = planned(f"{ACTOR}.use_kl_loss=True")
    weights = alone.roles["actor"].weights
    assert phases(kl)["rollout"] - phases(alone)["rollout"] == weights
    offloaded = planned(
        f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.fsdp_config.param_offload=True"
    )
    assert phases(offloaded)["update"] == phases(alone)["update"]
    critic = planned("algorithm.adv_estimator=gae")
    assert {"values", "critic update"} <= set(phases(critic))
    shape = critic.roles["critic"].shape
    assert critic.checkpoint == alone.checkpoint + 3 * 4 * shape.parameters


def test_the_sampler_has_weights_of_its_own_where_precision_differs(
    planned: Callable[..., Plan],
) -> None:
    own, shared = planned(), planned(f"{ACTOR}.fsdp_config.model_dtype=bf16")
    assert own.sampler.weights == 2 * own.roles["actor"].shape.parameters
    assert shared.sampler.weights == 0


def test_ranks_that_sample_together(planned: Callable[..., Plan]) -> None:
    ranks = ("trainer.n_gpus_per_node=4", f"{ROLLOUT}.gpu_memory_utilization=0.9")
    apart = planned(*ranks)
    together = planned(*ranks, f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert together.sampler.samples == 2 * apart.sampler.samples == 256
    assert together.sampler.page_bytes == apart.sampler.page_bytes // 2
    shape = apart.roles["actor"].shape
    assert apart.sampler.weights - together.sampler.weights == shape.matrices
    with pytest.raises(UnsupportedError, match=r"num_attention_heads=14; takes 1, 2$"):
        planned(*ranks, f"{ROLLOUT}.tensor_model_parallel_size=4")


def test_the_cache_is_bounded_by_its_share_of_the_device(planned: Callable[..., Plan]) -> None:
    plan = planned(f"{ROLLOUT}.gpu_memory_utilization=0.1", device="80")
    rollout = plan.phases[0]
    assert 0 < plan.cached_sequences < 256
    without_work = rollout.peak - rollout.parts["activations"]
    assert without_work <= 0.1 * 80 * GIB
    nothing = planned(f"{ROLLOUT}.gpu_memory_utilization=0.05", device="80")
    assert nothing.cached_sequences == 0
    assert not nothing.fits


@pytest.mark.parametrize(
    ("device", "status", "told"), [("h200", 0, "It fits"), ("4090", 0, "It fits"),
                                   ("6", 1, "It does not fit")]
)  # fmt: skip
def test_the_command_tells_and_returns_whether_it_fits(
    half_b: str, capsys: pytest.CaptureFixture[str], device: str, status: int, told: str
) -> None:
    keys = [f"actor_rollout_ref.model.path={half_b}", *STEP]
    assert main(["plan", "--device", device, *keys]) == status
    out = " ".join(capsys.readouterr().out.split())
    assert told in out
    assert "64 prompts x 8 responses = 512 samples" in out
    assert "4 mini-batches of 128 samples x 1 epoch = 4 optimiser steps" in out


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([f"{ROLLOUT}.name=hf"], "rollout.name='hf'.*takes native"),
        (["trainer.device=cpu"], "trainer.device='cpu'"),
        (["data.train_batch_size=63"], "data.train_batch_size=63 prompts"),
        ([f"{ROLLOUT}.n=1"], "rollout.n=1: algorithm.adv_estimator='grpo' compares"),
    ],
)
def test_what_is_not_planned_is_refused(
    planned: Callable[..., Plan], keys: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(*keys)


def test_megatron_is_refused(half_b: str) -> None:
    path = f"actor_rollout_ref.model.path={half_b}"
    config = _config([path, *STEP], "ppo_megatron_trainer", None)
    with pytest.raises(ConfigError, match="strategy='megatron': its memory is not worked out"):
        make_plan(config, GIB)


@pytest.mark.parametrize("name", ["l40", "0", "-3", "nan", "inf"])
def test_an_unknown_device(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device={name}: takes h200, .*GiB"):
        device_bytes(name)


def test_small_sizes_have_smaller_units() -> None:
    sizes = [0, 50, 3 * 2**10, 2**20 // 4, 64 * 2**20, GIB // 8, 24 * GIB, 140 * GIB]
    assert [_size(size) for size in sizes] == [
        "0", "50 B", "3.00 KiB", "0.25 MiB", "64.0 MiB", "0.12 GiB", "24.0 GiB", "140 GiB"
    ]  # fmt: skip


def test_a_tiny_model_has_no_column_of_zeros(
    config_folder: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = config_folder(
        "tiny", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    assert main(["plan", f"actor_rollout_ref.model.path={tiny}", *STEP]) == 0
    out = capsys.readouterr().out
    assert "0.00" not in out
    weights = next(line for line in out.splitlines() if line.startswith("weights"))
    assert weights.split()[1:] == ["0.33", "MiB"] * 3


def test_micro_batches_of_which_nothing_is_said_are_cut_by_tokens(
    half_b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"actor_rollout_ref.model.path={half_b}", *GRPO]) == 0
    assert (
        "at most 512 micro-batches of up to 16 samples (16,384 tokens)" in capsys.readouterr().out
    )
