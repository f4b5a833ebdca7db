"""What is chosen from the machine, and what is given."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig, resolve_for_machine
from caldera.errors import ConfigError

Load = Callable[..., PPOTrainerConfig]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
DTYPES = (
    f"{ACTOR}.fsdp_config.dtype",
    "actor_rollout_ref.ref.fsdp_config.dtype",
    "critic.model.fsdp_config.dtype",
    f"{ROLLOUT}.dtype",
)


@pytest.mark.parametrize(
    ("gpus", "device", "devices", "dtype"),
    [
        (0, "cpu", "1", "float32"),
        (1, "cuda", "1", "bfloat16"),
        (8, "cuda", "8", "bfloat16"),
    ],
)
def test_everything_that_is_chosen_is_told(
    load: Load, gpus: int, device: str, devices: str, dtype: str
) -> None:
    config = load()
    assert resolve_for_machine(config, gpus) == [
        "trainer.worker_group=local",
        f"trainer.device={device}",
        f"trainer.n_gpus_per_node={devices}",
        f"{ROLLOUT}.name=native",
        *(f"{key}={dtype}" for key in DTYPES),
    ]
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == (device, int(devices))
    assert config.actor_rollout_ref.rollout.name == "native"
    parts = config.actor_rollout_ref
    for part in (parts.actor, parts.ref, config.critic.model):
        assert part.fsdp_config.dtype == dtype
    assert parts.rollout.dtype == dtype
    assert resolve_for_machine(config, gpus) == []


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_explicit_values_are_obeyed(load: Load, gpus: int) -> None:
    given = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{ROLLOUT}.name=hf"]
    config = load("trainer.worker_group=local", *given, *(f"{key}=bfloat16" for key in DTYPES))
    assert resolve_for_machine(config, gpus) == []
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cpu", 2)
    assert config.actor_rollout_ref.rollout.name == "hf"
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_cpu_that_is_asked_for_computes_in_float32(load: Load, gpus: int) -> None:
    config = load("trainer.device=cpu")
    chosen = resolve_for_machine(config, gpus)
    assert chosen[1] == "trainer.n_gpus_per_node=1"
    assert f"{ROLLOUT}.dtype=float32" in chosen


def test_more_gpus_than_there_are(load: Load) -> None:
    config = load("trainer.device=cuda", "trainer.n_gpus_per_node=8")
    with pytest.raises(ConfigError, match=r"the run asks for 8 GPUs, this machine has 2$"):
        resolve_for_machine(config, gpus=2)


def test_a_batch_that_the_machines_gpus_cannot_share(load: Load) -> None:
    config = load("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6")
    message = r"^data\.train_batch_size=6 prompts x .*n=1 = 6 samples cannot be shared by 4 devices"
    with pytest.raises(ConfigError, match=message):
        resolve_for_machine(config, gpus=4)


def test_ray_is_chosen_for_several_nodes_and_where_there_is_a_cluster(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = load("trainer.nnodes=2")
    assert "trainer.worker_group=ray" in resolve_for_machine(several, gpus=0)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "trainer.worker_group=ray" in resolve_for_machine(load(), gpus=0)
    own = load("trainer.worker_group=local")
    assert resolve_for_machine(own, gpus=0)[0] == "trainer.device=cpu"


def test_bfloat16_parameters_on_a_cpu(load: Load) -> None:
    config = load(f"{ACTOR}.fsdp_config.model_dtype=bf16")
    resolve_for_machine(config, gpus=0)
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16"
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.actor_rollout_ref.ref.fsdp_config.dtype == "float32"


def test_cuda_without_a_gpu(load: Load) -> None:
    with pytest.raises(
        ConfigError, match=r"^trainer\.device='cuda': this machine has no usable GPU"
    ):
        resolve_for_machine(load("trainer.device=cuda"), gpus=0)


@pytest.mark.parametrize(("ranks", "warns"), [(2, False), (3, True)])
def test_more_processes_than_cores_are_warned_of(
    load: Load, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ranks: int,
    warns: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    batch = ("data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6")
    config = load(f"trainer.n_gpus_per_node={ranks}", "critic.ppo_mini_batch_size=6", *batch)
    with caplog.at_level(logging.WARNING):
        resolve_for_machine(config, 0)
    told = [message for message in caplog.messages if "cores" in message]
    assert [text[:65] for text in told] == (
        ["trainer.n_gpus_per_node: 3 processes share 2 CPU cores, which is "] if warns else []
    )


def test_a_choice_of_attention_kernels_is_dropped_with_one_warning(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    key = "override_config.attn_implementation"
    with caplog.at_level(logging.WARNING):
        config = load(
            f"+actor_rollout_ref.model.{key}=flash_attention_2", f"+critic.model.{key}=eager"
        )
    told = [message for message in caplog.messages if "attention" in message]
    assert [text.split(" has no effect")[0] for text in told] == [
        f"actor_rollout_ref.model.{key}=flash_attention_2", f"critic.model.{key}=eager",
    ]  # fmt: skip
    assert config.actor_rollout_ref.model.override_config == {}


def test_other_options_of_loading_that_a_config_does_not_have_are_dropped(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "actor_rollout_ref.model.override_config._attn_implementation=sdpa": "attention function",
        "actor_rollout_ref.model.override_config.torch_dtype=bfloat16": (
            "precision of parameters is actor_rollout_ref.actor.fsdp_config.model_dtype;"
        ),
        "critic.model.override_config.dtype=bfloat16": (
            "precision of parameters is critic.model.fsdp_config.model_dtype;"
        ),
    }
    with caplog.at_level(logging.WARNING):
        config = load(*(f"+{text}" for text in given))
    for text, reason in given.items():
        (told,) = [message for message in caplog.messages if message.startswith(text)]
        assert " has no effect: " in told and reason in told
    assert config.actor_rollout_ref.model.override_config == {}
    assert config.critic.model.override_config == {}
