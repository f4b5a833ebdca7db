"""Keys that must fit together, and what depends on the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig, needs_critic, needs_reference
from caldera.errors import ConfigError, UnsupportedError

Load = Callable[..., PPOTrainerConfig]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("key", ["data.train_files", "actor_rollout_ref.model.path"])
def test_required_keys(load: Load, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} is required: give {key}=\.\.\.$"):
        load(without=key)


def test_without_files_to_validate_on_nothing_is_validated(load: Load) -> None:
    config = load("data.val_files=null")
    assert (config.data.val_files, config.trainer.val_before_train) == ([], False)
    assert load().trainer.val_before_train


def test_what_is_pushed_is_saved_as_a_model_or_an_adapter(load: Load) -> None:
    push = ("trainer.push_to_hub=me/model", "trainer.save_freq=5")
    assert "hf_model" in load(*push).actor_rollout_ref.actor.checkpoint.save_contents
    adapter = load(*push, "actor_rollout_ref.model.lora_rank=4").actor_rollout_ref.actor
    assert "hf_model" not in adapter.checkpoint.save_contents
    assert "hf_model" not in load().actor_rollout_ref.actor.checkpoint.save_contents


def test_resume_path_needs_a_path(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"needs trainer\.resume_from_path"):
        load("trainer.resume_mode=resume_path")
    load("trainer.resume_mode=resume_path", "trainer.resume_from_path=somewhere/global_step_3")


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_path_that_is_not_resumed_from_is_warned_of(
    load: Load, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    start = "trainer.resume_from_path=somewhere/global_step_3"
    load(f"trainer.resume_mode={mode}", "trainer.resume_from_path=False")  # verl's once
    load("trainer.resume_mode=resume_path", start)
    assert "resume_from_path" not in caplog.text
    load(f"trainer.resume_mode={mode}", start)
    assert f"is not read with trainer.resume_mode={mode}" in caplog.text
    assert "trainer.resume_mode=resume_path starts from it" in caplog.text


@pytest.mark.parametrize("key", ["name=score", "reward_kwargs.a=1"])
def test_options_of_a_score_function_need_its_file(load: Load, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^custom_reward_function\.{key.partition('=')[0][:4]}.*: needs "
        r"custom_reward_function\.path=\.\.\.",
    ):  # fmt: skip
        load(f"custom_reward_function.{key}")
    load("custom_reward_function.path=mine.py", f"custom_reward_function.{key}")


def test_the_name_of_a_reward_manager_needs_its_file(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"^reward_manager\.module\.name='Mine': needs "):
        load("reward_manager.module.name=Mine")


@pytest.mark.parametrize("key", ["n=4", "temperature=0.7", "top_p=0.9", "top_k=5", "min_p=0.1"])
def test_sampling_of_a_greedy_validation_is_warned_of(
    load: Load, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    validation = f"{ROLLOUT}.val_kwargs"
    load(f"{validation}.{key}", f"{validation}.do_sample=True", f"{validation}.temperature=0.6")
    load(f"{validation}.repetition_penalty=1.1")
    assert "val_kwargs" not in caplog.text
    load(f"{validation}.{key}")
    assert f"{validation}.{key} has no effect on a greedy validation" in caplog.text
    assert f"{validation}.do_sample=True" in caplog.text


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


def test_several_nodes_need_ray(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.worker_group='local': .*need 'ray'$"):
        load("trainer.nnodes=2", "trainer.worker_group=local")


def test_a_pool_for_the_reward_model_needs_a_node(load: Load) -> None:
    pool = ("reward_model.enable=True", "reward_model.enable_resource_pool=True")
    with pytest.raises(ConfigError, match=r"^reward_model\.nnodes=0: .*at least 1 node$"):
        load(*pool, "reward_model.micro_batch_size_per_gpu=4")


@pytest.mark.parametrize("name", ["trtllm", "remote"])
def test_samplers_that_cannot_train_are_refused(load: Load, name: str) -> None:
    told = rf"^{ROLLOUT}\.name='{name}'.*takes native, hf, vllm, sglang$"
    with pytest.raises(UnsupportedError, match=told):
        load(f"{ROLLOUT}.name={name}")


@pytest.mark.parametrize(
    "key",
    [
        "engine_python=/p", "tensor_model_parallel_size=2", "data_parallel_size=2",
        "cudagraph_capture_sizes=[1]", "disable_log_stats=False", "multi_stage_wake_up=True",
        "checkpoint_engine.update_weights_bucket_megabytes=8", "engine_kwargs.vllm.seed=1",
    ],
)  # fmt: skip
def test_keys_of_engines_are_theirs_alone(load: Load, key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(UnsupportedError, match=rf"^{ROLLOUT}\.{name[:13]}.*not hf$"):
        load(f"{ROLLOUT}.name=hf", f"{ROLLOUT}.{key}")
    load(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.{key}")


def test_ranks_that_share_the_native_sampler(load: Load) -> None:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    assert load(f"{key}=2").actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    load(f"{key}=2", "trainer.n_gpus_per_node=4")
    with pytest.raises(ConfigError, match=rf"^{key}=2 does not divide the 3 ranks \(trainer\."):
        load(f"{key}=2", "trainer.n_gpus_per_node=3", "data.train_batch_size=1024")
    with pytest.raises(UnsupportedError, match=rf"^{ROLLOUT}\.native\.exact=True with {key}=2: "):
        load(f"{key}=2", f"{ROLLOUT}.native.exact=True")
    with pytest.raises(UnsupportedError, match=rf"^{key}=2: takes .*name=native, vllm or sglang"):
        load(f"{key}=2", f"{ROLLOUT}.name=hf")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_ranks_that_share_an_engine(load: Load, name: str) -> None:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    shared = [f"{ROLLOUT}.name={name}", f"{key}=2"]
    load(*shared, "trainer.n_gpus_per_node=4")
    load(*shared, "trainer.n_gpus_per_node=1")  # its engine has two of the devices that it sees
    with pytest.raises(ConfigError, match=rf"^{key}=2 does not divide the 3 ranks \(trainer\."):
        load(*shared, "trainer.n_gpus_per_node=3")
    with pytest.raises(ConfigError, match=rf"^{key}=2 .*n_gpus_per_node=1: .*{name} engine.*node"):
        load(*shared, "trainer.n_gpus_per_node=1", "trainer.nnodes=2")


@pytest.mark.parametrize(
    "key", ["kv_cache_blocks=8", "native.exact=True", "engine_kwargs.sglang.x=1"]
)
def test_keys_that_vllm_does_not_take(load: Load, key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"not vllm$"):
        load(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.{key}")


def test_no_server_elsewhere_is_trained(load: Load) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{ROLLOUT}\.remote\.url='http://h': "):
        load(f"{ROLLOUT}.remote.url=http://h")


def test_a_sampler_of_the_users_is_left_to_the_registry(load: Load) -> None:
    assert load(f"{ROLLOUT}.name=mine").actor_rollout_ref.rollout.name == "mine"


def test_arguments_of_ray_are_kept(load: Load) -> None:
    assert load("ray_kwargs.ray_init.num_cpus=4").ray_kwargs.ray_init == {"num_cpus": 4}


def test_arguments_at_null_are_not_given(load: Load) -> None:
    load(f"{ROLLOUT}.engine_kwargs.vllm.seed=null", "ray_kwargs.ray_init.runtime_env.x=null")


def test_bfloat16_parameters_do_not_compute_in_float32(load: Load) -> None:
    memory = f"{ACTOR}.fsdp_config"
    with pytest.raises(UnsupportedError, match=rf"^{memory}\.dtype='float32' with"):
        load(f"{memory}.model_dtype=bf16", f"{memory}.dtype=float32")


def test_checkpoint_contents(load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load("critic.checkpoint.save_contents=[model,optimiser]")
    assert str(raised.value) == (
        "critic.checkpoint.save_contents=['model', 'optimiser']: optimiser is not one of model, "
        "optimizer, extra, hf_model"
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


def test_the_losss_copy_of_the_correction_is_not_set_by_itself(load: Load) -> None:
    copy = f"{ACTOR}.policy_loss.rollout_correction"
    with pytest.raises(ConfigError, match="has the values of"):
        load(f"{copy}.rollout_is=token")
    config = load("algorithm.rollout_correction.rollout_is=token")
    assert config.actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is == "token"


def test_statistics_between_commas_are_one_value(load: Load) -> None:
    """Hydra takes such a list for several runs."""
    key = "algorithm.rollout_correction"
    correction = load(
        f"{key}.rollout_rs=token_k1,seq_max_k2", f"{key}.rollout_rs_threshold=2.0,0.5"
    ).algorithm.rollout_correction
    assert correction.rollout_rs == "token_k1,seq_max_k2"
    assert correction.rollout_rs_threshold == "2.0,0.5"


def test_a_preset_fills_what_is_left_at_its_default(load: Load) -> None:
    key = "algorithm.rollout_correction"
    preset = f"{key}.preset=decoupled_seq_is_rs"
    correction = load(preset, f"{key}.rollout_is_threshold=3.0").algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_rs) == ("sequence", "seq_sum_k1")
    assert (correction.rollout_is_threshold, correction.rollout_rs_threshold) == (3.0, "0.5_2.0")


def test_two_penalties_are_warned_of(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    size = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"
    with caplog.at_level(logging.WARNING, logger="caldera"):
        load(size, "algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True")
    assert "the distance to the reference counts twice" in caplog.text


def test_devices_that_share_tokens_come_in_whole_groups(load: Load) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^actor_rollout_ref\.actor\.ulysses_sequence_parallel_size=4 x "
        r"tensor_parallel_size=1 ranks do not divide the 2 devices",
    ):
        load("trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=4")
    load("trainer.n_gpus_per_node=4", f"{ACTOR}.ulysses_sequence_parallel_size=4")


def test_the_token_budget_is_that_of_all_ranks_that_share_a_sample(load: Load) -> None:
    tokens = (
        f"{ACTOR}.use_dynamic_bsz=True", "data.max_prompt_length=64", "data.max_response_length=64",
        f"{ACTOR}.ppo_max_token_len_per_gpu=64", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=128",
        "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="=64 tokens cannot hold one sample of up to 128 tokens"):
        load(*tokens)
    load(*tokens, f"{ACTOR}.ulysses_sequence_parallel_size=2")


def test_classic_files_are_written_before_training_goes_on(load: Load) -> None:
    told = (f"{ACTOR}.checkpoint.layout=classic", f"{ACTOR}.checkpoint.async_save=True")
    with pytest.raises(ConfigError, match=r"async_save=True: .*layout=classic takes false"):
        load(*told)
