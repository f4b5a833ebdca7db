"""Keys that must fit together, and what depends on the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig, needs_critic, needs_reference, resolve_for_machine
from caldera.errors import ConfigError, UnsupportedError

Load = Callable[..., PPOTrainerConfig]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "key", ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"]
)
def test_required_keys(load: Load, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} is required: give {key}=\.\.\.$"):
        load(without=key)


def test_resume_path_needs_a_path(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"needs trainer\.resume_from_path"):
        load("trainer.resume_mode=resume_path")
    load("trainer.resume_mode=resume_path", "trainer.resume_from_path=somewhere/global_step_3")


def test_a_batch_that_does_not_divide_names_both_numbers_and_units(load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load("data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=4")
    message = str(raised.value)
    assert "data.train_batch_size=10 prompts" in message
    assert f"{ACTOR}.ppo_mini_batch_size=4 prompts" in message
    assert "(10 = 2 x 4 + 2)" in message


def test_a_mini_batch_larger_than_the_batch(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size=8 prompts.*\(4 = 0 x 8 \+ 4\)"):
        load("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=8")


def test_the_critics_mini_batch_counts_only_where_there_is_a_critic(load: Load) -> None:
    overrides = [
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=3",
    ]
    with pytest.raises(ConfigError, match=r"critic\.ppo_mini_batch_size=3 prompts"):
        load(*overrides)
    load(*overrides, "algorithm.adv_estimator=grpo")


@pytest.mark.parametrize(
    ("group", "key", "by_tokens"),
    [
        (ACTOR, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
        (ROLLOUT, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
        ("actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
        ("critic", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
    ],
)
def test_a_missing_micro_batch_size(load: Load, group: str, key: str, by_tokens: str) -> None:
    with_reference = f"{ACTOR}.use_kl_loss=True"
    with pytest.raises(ConfigError) as raised:
        load(
            with_reference,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
            f"{group}.{key}=null",
        )
    message = str(raised.value)
    assert message.startswith(f"{group}.{key}=null: give it a number of samples")
    assert message.endswith(f"{group}.{by_tokens}=True")


def test_micro_batches_by_tokens_need_no_size(load: Load) -> None:
    load(f"{ACTOR}.use_dynamic_bsz=True", without=f"{ACTOR}.ppo_micro_batch_size_per_gpu")


def test_the_reference_needs_a_size_only_where_it_is_used(load: Load) -> None:
    load()
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.ref\.log_prob_micro"):
        load("algorithm.use_kl_in_reward=True")


def test_who_needs_a_critic(load: Load) -> None:
    assert needs_critic(load())
    assert not needs_critic(load("algorithm.adv_estimator=grpo"))
    assert needs_critic(load("algorithm.adv_estimator=grpo", "critic.enable=True"))
    assert not needs_critic(load("algorithm.adv_estimator=grpo", "critic.enable=False"))
    with pytest.raises(ConfigError, match=r"critic\.enable=False"):
        load("critic.enable=False")


def test_who_needs_a_reference(load: Load) -> None:
    size = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"
    assert not needs_reference(load())
    assert needs_reference(load(size, "algorithm.use_kl_in_reward=True"))
    assert needs_reference(load(size, f"{ACTOR}.use_kl_loss=True"))


def test_one_process_only(load: Load) -> None:
    with pytest.raises(UnsupportedError, match=r"^trainer\.n_gpus_per_node=8: .*takes 1$"):
        load("trainer.n_gpus_per_node=8")


@pytest.mark.parametrize(
    "key", [f"{ACTOR}.strategy", "actor_rollout_ref.ref.strategy", "critic.strategy"]
)
def test_megatron_is_refused(load: Load, key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'megatron' is not part of this release"):
        load(f"{key}=megatron")
    load(f"{key}=fsdp2")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_other_samplers_are_refused(load: Load, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{ROLLOUT}\.name='{name}'.*takes native, hf$"):
        load(f"{ROLLOUT}.name={name}")


def test_a_sampler_of_the_users_is_left_to_the_registry(load: Load) -> None:
    assert load(f"{ROLLOUT}.name=mine").actor_rollout_ref.rollout.name == "mine"


@pytest.mark.parametrize(
    "override", [f"{ROLLOUT}.engine_kwargs.vllm.seed=1", "ray_kwargs.ray_init.num_cpus=4"]
)
def test_arguments_that_nothing_takes(load: Load, override: str) -> None:
    with pytest.raises(UnsupportedError, match="nothing in this release takes it"):
        load(override)


def test_bfloat16_parameters_do_not_compute_in_float32(load: Load) -> None:
    memory = f"{ACTOR}.fsdp_config"
    with pytest.raises(UnsupportedError, match=rf"^{memory}\.dtype='float32' with"):
        load(f"{memory}.model_dtype=bf16", f"{memory}.dtype=float32")


def test_checkpoint_contents(load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load("critic.checkpoint.save_contents=[model,optimiser]")
    assert str(raised.value) == (
        "critic.checkpoint.save_contents: optimiser is not one of model, optimizer, extra, hf_model"
    )
    load(f"{ACTOR}.checkpoint.save_contents=[model,hf_model]")


def test_betas_are_two(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"critic\.optim\.betas=\[0\.9\]: takes two numbers"):
        load("critic.optim.betas=[0.9]")


def test_sampling_needs_a_temperature(load: Load) -> None:
    with pytest.raises(ConfigError, match=rf"^{ROLLOUT}\.temperature=0\.0: sampling needs"):
        load(f"{ROLLOUT}.temperature=0")
    load(f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.do_sample=False")
    with pytest.raises(ConfigError, match=r"val_kwargs\.temperature > 0, got 0"):
        load(f"{ROLLOUT}.val_kwargs.do_sample=True")
    load(f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=0.6")


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.2"], True),
        ([f"{ACTOR}.clip_ratio_low=0.5"], True),
        ([f"{ACTOR}.clip_ratio_high=1"], True),
        ([f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"], False),
        ([], False),
    ],
)
def test_clip_distances_that_look_like_bounds(
    load: Load, caplog: pytest.LogCaptureFixture, overrides: list[str], warned: bool
) -> None:
    with caplog.at_level(logging.WARNING, logger="caldera"):
        load(*overrides)
    assert ("are distances from 1, not bounds of the ratio" in caplog.text) is warned


def test_defaults_of_a_machine_without_gpu(load: Load) -> None:
    config = load()
    chosen = resolve_for_machine(config, gpus=0)
    parts = config.actor_rollout_ref
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cpu", 1)
    assert (parts.rollout.name, parts.rollout.dtype) == ("native", "float32")
    for part in (parts.actor, parts.ref, config.critic.model):
        assert part.fsdp_config.dtype == "float32"
    assert "trainer.device=cpu" in chosen
    assert f"{ROLLOUT}.dtype=float32" in chosen
    assert "critic.model.fsdp_config.dtype=float32" in chosen
    assert resolve_for_machine(config, gpus=0) == []


def test_defaults_of_a_machine_with_a_gpu(load: Load) -> None:
    config = load()
    assert "trainer.device=cuda" in resolve_for_machine(config, gpus=1)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16"
    assert config.critic.model.fsdp_config.dtype == "bfloat16"


def test_bfloat16_parameters_on_a_cpu(load: Load) -> None:
    config = load(f"{ACTOR}.fsdp_config.model_dtype=bf16")
    resolve_for_machine(config, gpus=0)
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16"
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.actor_rollout_ref.ref.fsdp_config.dtype == "float32"


def test_what_is_given_stays(load: Load) -> None:
    config = load(
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.dtype=bfloat16",
    )
    chosen = resolve_for_machine(config, gpus=1)
    assert config.trainer.device == "cpu"
    assert (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.dtype) == (
        "hf",
        "bfloat16",
    )
    assert [text.partition("=")[0] for text in chosen] == [
        f"{ACTOR}.fsdp_config.dtype",
        "actor_rollout_ref.ref.fsdp_config.dtype",
        "critic.model.fsdp_config.dtype",
    ]


def test_cuda_without_a_gpu(load: Load) -> None:
    with pytest.raises(
        ConfigError, match=r"^trainer\.device='cuda': this machine has no usable GPU"
    ):
        resolve_for_machine(load("trainer.device=cuda"), gpus=0)
