"""Keys that releases of verl after 0.7 moved or added."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from caldera.config import (
    PPOTrainerConfig,
    compose_config,
    config_to_dict,
    known_keys,
    load_config,
)
from caldera.config.migrate import MOVED, is_target, later_keys, later_reason, migrate, moved_to
from caldera.errors import ConfigError, UnsupportedError
from tests.unit.config.verl_facts import FILES, facts, is_known, look_up, tree_of

Load = Callable[..., PPOTrainerConfig]
HEAD = {name: facts("head", name) for name in FILES}
EVERY_HEAD_KEY = {key: value for name in FILES for key, value in HEAD[name].items()}


def moves(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "were moved" in message]


def is_moved(key: str) -> bool:
    place = moved_to(key)
    return place is not None and is_known(place) and not is_known(key)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_known_moved_or_of_later_releases(name: str) -> None:
    strangers = [
        key
        for key in HEAD[name]
        if not (is_known(key) or is_target(key) or is_moved(key) or key in later_keys())
    ]
    assert strangers == []


def test_the_later_keys_are_those_that_are_neither_known_nor_moved() -> None:
    strangers = [key for key in EVERY_HEAD_KEY if not (is_known(key) or is_target(key))]
    assert set(later_keys()) == {key for key in strangers if not is_moved(key)}
    for key, default in later_keys().items():
        assert default in [HEAD[name][key] for name in FILES if key in HEAD[name]], key


def test_moved_keys_land_in_their_places(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "reward.custom_reward_function.path": ("custom_reward_function.path", "score.py"),
        "reward.custom_reward_function.reward_kwargs": (
            "custom_reward_function.reward_kwargs",
            {"strict": True},
        ),
        "reward.reward_manager.name": ("reward_manager.name", "dapo"),
        "reward.reward_manager.module.path": ("reward_manager.module.path", "mine.py"),
        "reward.reward_kwargs": ("reward_model.reward_kwargs", {"max_resp_len": 7}),
        "reward.reward_model.model_path": ("reward_model.model.path", "RM"),
        "reward.reward_model.enable": ("reward_model.enable", True),
        "reward.reward_model.rollout.max_num_seqs": ("reward_model.rollout.max_num_seqs", 5),
        "reward.sandbox_fusion.url": ("reward_model.sandbox_fusion.url", "http://a"),
        "sandbox_fusion.max_concurrent": ("reward_model.sandbox_fusion.max_concurrent", 9),
        "critic.fsdp.param_offload": ("critic.model.fsdp_config.param_offload", True),
        "skip.rollout.enable": ("actor_rollout_ref.rollout.skip_rollout", True),
        "skip.rollout.dump_dir": ("actor_rollout_ref.rollout.skip_dump_dir", "there"),
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
            512,
        ),
        "trainer.profile_steps": ("global_profiler.steps", [1, 2]),
        "ray_init.num_cpus": ("ray_kwargs.ray_init.num_cpus", 4),
        "ray_init.timeline_json_file": ("ray_kwargs.timeline_json_file", "there"),
        "actor_rollout_ref.rollout.n_agent": ("actor_rollout_ref.rollout.n", 5),
        "data.train_data_num": ("data.train_max_samples", 100),
        "data.val_data_num": ("data.val_max_samples", 50),
        "data.shuffle_train_dataloader": ("data.shuffle", False),
    }
    assert {old for old in MOVED if not any(key.startswith(old) for key in given)} == set()
    values = {key: value for key, (_, value) in given.items()}
    overrides = [f"{key}={_text(value)}" for key, value in values.items()]
    with caplog.at_level(logging.WARNING):
        config = compose_config(overrides, "ppo_trainer", None, PPOTrainerConfig)
    for place, value in given.values():
        assert look_up(config_to_dict(config), place) == value, place
    (warning,) = moves(caplog)
    assert all(f"{old} -> {place}" in warning for old, (place, _) in given.items())


def _text(value: Any) -> str:
    return str(value).replace("'", "")


def test_every_moved_key_of_the_tables_lands_on_a_known_one() -> None:
    moved = [key for key in EVERY_HEAD_KEY if is_moved(key)]
    assert len(moved) > 50
    for key in moved:
        assert migrate({key: "value"}, frozenset(known_keys())) == {moved_to(key): "value"}


def test_both_places_may_say_the_same(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    old, new = "critic.fsdp.param_offload", "critic.model.fsdp_config.param_offload"
    with caplog.at_level(logging.WARNING):
        assert load(f"{old}=True", f"{new}=True").critic.model.fsdp_config.param_offload is True
    assert len(moves(caplog)) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_both_places_with_two_values(load: Load, turned: bool) -> None:
    given = ["critic.fsdp.param_offload=True", "critic.model.fsdp_config.param_offload=False"]
    given = given[::-1] if turned else given
    with pytest.raises(ConfigError) as raised:
        load(*given)
    assert str(raised.value) == (
        f"{given[0]} and {given[1]} are one key: set critic.model.fsdp_config.param_offload alone"
    )


def test_null_in_a_place_that_was_left_is_not_a_value(load: Load) -> None:
    """Later releases keep the old keys, at null."""
    config = load("reward_model.reward_manager=null", "reward.reward_manager.name=dapo")
    assert (config.reward_model.reward_manager, config.reward_manager.name) == ("naive", "dapo")
    assert load("custom_reward_function.name=null").custom_reward_function.name == "compute_score"
    own_tokens = load("reward_model.model.input_tokenizer=null")  # no later release has that key
    assert own_tokens.reward_model.model.input_tokenizer is None


def test_no_warning_where_nothing_moved(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load("trainer.use_v1=true")
    assert moves(caplog) == []


def test_later_keys_at_their_defaults_are_left_out() -> None:
    assert migrate(later_keys(), frozenset(known_keys())) == {}


def test_later_keys_at_other_values_are_refused_with_a_reason() -> None:
    for key in later_keys():
        with pytest.raises(UnsupportedError) as raised:
            migrate({key: "other"}, frozenset(known_keys()))
        assert str(raised.value) == f"{key}='other' is not supported: {later_reason(key)}"
        assert len(later_reason(key)) > 10


def test_a_default_that_follows_another_key_may_be_given_resolved(load: Load) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.entropy_from_logits_chunk_size"
    load(f"{key}=2048")
    with pytest.raises(UnsupportedError, match=rf"^{key}=1024 is not supported: "):
        load(f"{key}=1024")


def test_a_copy_of_a_later_file_loads(
    tmp_path: Path, required: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "verls.yaml").write_text(OmegaConf.to_yaml(tree_of(HEAD["ppo_trainer"])))
    with caplog.at_level(logging.WARNING):
        config = load_config(required, "verls", str(tmp_path))
    assert len(moves(caplog)) == 1
    default = load_config(required)
    assert (config.algorithm, config.global_profiler) == (
        default.algorithm,
        default.global_profiler,
    )
    config.actor_rollout_ref.model.mtp = default.actor_rollout_ref.model.mtp  # later ones differ
    assert config.actor_rollout_ref.model == default.actor_rollout_ref.model
    assert (config.reward_manager.name, config.critic.model.fsdp_config.dtype) == (
        "naive",
        "bfloat16",
    )
