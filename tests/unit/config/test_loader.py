"""From YAML files and overrides to a typed config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from caldera.config import (
    CONFIG_DIR,
    PPOTrainerConfig,
    compose_config,
    config_to_dict,
    config_to_yaml,
    known_keys,
    load_config,
)
from caldera.errors import ConfigError, UnknownKeyError, UnsupportedError

Load = Callable[..., PPOTrainerConfig]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")))
def test_every_yaml_file_loads(name: str) -> None:
    config = compose_config([], name, None)
    assert isinstance(config, PPOTrainerConfig)
    assert config.data.train_batch_size == 1024


def test_lengths_follow_the_data(load: Load) -> None:
    rollout = load(
        "data.max_prompt_length=7", "data.max_response_length=9"
    ).actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length) == (7, 9)
    own = load("data.max_prompt_length=7", "actor_rollout_ref.rollout.prompt_length=8")
    assert own.actor_rollout_ref.rollout.prompt_length == 8


def test_critic_follows_the_actor(load: Load) -> None:
    actor = "actor_rollout_ref.actor"
    config = load(
        f"{actor}.ppo_mini_batch_size=32",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_epochs=3",
        f"{actor}.shuffle=True",
        f"{actor}.loss_agg_mode=token-sum",
        "actor_rollout_ref.model.trust_remote_code=True",
    )
    critic = config.critic
    assert (critic.ppo_mini_batch_size, critic.use_dynamic_bsz) == (32, True)
    assert (critic.ppo_epochs, critic.shuffle, critic.loss_agg_mode) == (3, True, "token-sum")
    assert (critic.model.path, critic.model.tokenizer_path) == ("M", "M")
    assert critic.model.trust_remote_code is True
    assert critic.forward_micro_batch_size_per_gpu == critic.ppo_micro_batch_size_per_gpu == 4
    assert critic.optim.lr == 1e-5
    assert load(f"{actor}.ppo_epochs=3", "critic.ppo_epochs=2").critic.ppo_epochs == 2


def test_reference_and_rollout_follow_the_actor(load: Load) -> None:
    actor = "actor_rollout_ref.actor"
    config = load(
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=99",
    ).actor_rollout_ref
    assert config.ref.strategy == "fsdp2"
    for part in (config.ref, config.rollout):
        assert (part.log_prob_use_dynamic_bsz, part.log_prob_max_token_len_per_gpu) == (True, 99)


def test_clip_bounds_follow_clip_ratio(load: Load) -> None:
    actor = load("actor_rollout_ref.actor.clip_ratio=0.1").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.1)
    actor = load("actor_rollout_ref.actor.clip_ratio_high=0.28").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)


def test_contents_read_back_follow_those_saved(load: Load) -> None:
    config = load("actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    assert config.actor_rollout_ref.actor.checkpoint.load_contents == ["model"]
    assert config.critic.checkpoint.load_contents == ["model", "optimizer", "extra"]


def test_one_file_is_a_list_of_one(load: Load) -> None:
    config = load("data.val_files=['a.parquet','b c.parquet']", "trainer.logger=console")
    assert config.data.train_files == ["train.parquet"]
    assert config.data.val_files == ["a.parquet", "b c.parquet"]
    assert config.trainer.logger == ["console"]


def test_the_data_seed_is_the_rollouts_unless_given(load: Load) -> None:
    assert load("actor_rollout_ref.rollout.seed=5").data.seed == 5
    assert load("actor_rollout_ref.rollout.seed=5", "data.seed=6").data.seed == 6


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("actor_rollout_ref.actor.clip_ration=0.1", "actor_rollout_ref.actor.clip_ratio"),
        ("data.kl_loss_coef=0.1", "actor_rollout_ref.actor.kl_loss_coef"),
        ("+trainer.totl_epochs=3", "trainer.total_epochs"),
        ("data={trian_batch_size: 8}", "data.train_batch_size"),
    ],
)
def test_an_unknown_key_names_the_nearest(load: Load, override: str, guess: str) -> None:
    with pytest.raises(UnknownKeyError) as raised:
        load(override)
    assert str(raised.value).endswith(f"; did you mean {guess}?")


def test_an_unknown_key_without_a_near_one(load: Load) -> None:
    with pytest.raises(UnknownKeyError, match=r"^unknown config key 'zzzzz' in 'zzzzz=1'$"):
        load("zzzzz=1")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.train_batch_size=many", "data.train_batch_size", "'many'"),
        ("data.train_batch_size=1.5", "data.train_batch_size", "'1.5'"),
        ("data.shuffle=maybe", "data.shuffle", "'maybe'"),
        ("actor_rollout_ref.actor.optim.lr=fast", "actor_rollout_ref.actor.optim.lr", "'fast'"),
        ("trainer=fast", "trainer", "fast"),
    ],
)
def test_a_wrong_type_names_key_and_value(load: Load, override: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(override)
    assert str(raised.value).startswith(f"{key}: ")
    assert value in str(raised.value)


def test_plus_of_a_known_key_is_a_plain_override(load: Load) -> None:
    assert load("+data.truncation=left").data.truncation == "left"
    assert load("++data.truncation=left").data.truncation == "left"


def test_free_dictionaries_take_any_key(load: Load) -> None:
    model = "actor_rollout_ref.model.override_config"
    for override in (
        f"{model}.depth.inner=3",
        f"+{model}.depth.inner=3",
        f"{model}={{depth: {{inner: 3}}}}",
    ):
        assert load(override).actor_rollout_ref.model.override_config == {"depth": {"inner": 3}}
    optim = "actor_rollout_ref.actor.optim.override_optimizer_config"
    for override in (f"{optim}.eps=1e-5", f"+{optim}={{eps: 1e-5}}"):
        assert load(override).actor_rollout_ref.actor.optim.override_optimizer_config == {
            "eps": 1e-5
        }
    assert load(f"{optim}=null").actor_rollout_ref.actor.optim.override_optimizer_config is None
    assert load().actor_rollout_ref.actor.optim.override_optimizer_config == {}


@pytest.mark.parametrize("override", ["~data.truncation", "~data", "~data.truncation=error"])
def test_keys_cannot_be_deleted(load: Load, override: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be deleted"):
        load(override)


@pytest.mark.parametrize("override", ["data.train_batch_size", "data.train_batch_size=[1", "a b=3"])
def test_what_is_no_override_is_shown(load: Load, override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(override)
    assert repr(override) in str(raised.value)


@pytest.mark.parametrize("value", ["<info>", "a=b", "<it's>", "<back\\slash\\", "<\\'"])
def test_values_that_a_shell_took_the_quotes_from(load: Load, value: str) -> None:
    assert load(f"data.prompt_key={value}").data.prompt_key == value


def test_an_interpolation_that_leads_nowhere(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"^data\.max_prompt_length: .*'data\.nothing'"):
        load("data.max_prompt_length=${data.nothing}")


def test_a_folder_of_the_users_builds_on_the_one_here(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "data:\n  train_files: a\n  val_files: b\n  train_batch_size: 8\n  max_prompt_length: 77\n"
        "algorithm:\n  adv_estimator: grpo\n"
        "actor_rollout_ref:\n"
        "  model:\n    path: M\n    override_config:\n      depth: 3\n"
        "  actor:\n    ppo_mini_batch_size: 8\n    use_dynamic_bsz: true\n"
    )
    config = load_config(["actor_rollout_ref.rollout.n=2"], "mine", str(tmp_path))
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (8, 2)
    assert config.actor_rollout_ref.rollout.prompt_length == 77
    assert config.actor_rollout_ref.model.override_config == {"depth": 3}
    assert (
        load_config(["data.train_batch_size=16"], "mine", str(tmp_path)).data.train_batch_size == 16
    )


def test_an_unknown_key_in_the_users_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  save_frequ: 8\n"
    )
    with pytest.raises(UnknownKeyError, match=r"did you mean trainer\.save_freq\?"):
        load_config([], "mine", str(tmp_path))


def test_a_missing_file_lists_those_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-name=nope: .*\(there: .*ppo_trainer"):
        load_config([], "nope")
    with pytest.raises(ConfigError, match=r"\(there: none\)"):
        load_config([], "ppo_trainer", str(tmp_path))


def test_yaml_round_trip(load: Load, tmp_path: Path) -> None:
    config = load("data.max_prompt_length=7", "actor_rollout_ref.model.override_config.depth=3")
    text = config_to_yaml(config)
    assert yaml.safe_load(text) == config_to_dict(config)
    assert "${" not in text
    (tmp_path / "again.yaml").write_text(f"defaults: [ppo_trainer_schema, _self_]\n{text}")
    assert load_config([], "again", str(tmp_path)) == config


def test_loading_twice_shares_nothing(load: Load) -> None:
    first = load()
    first.actor_rollout_ref.actor.optim.betas.append(0.0)
    assert load().actor_rollout_ref.actor.optim.betas == [0.9, 0.999]


def test_known_keys() -> None:
    keys = known_keys()
    assert keys["actor_rollout_ref.model.override_config"] is True
    assert keys["actor_rollout_ref.actor.optim.override_optimizer_config"] is True
    assert keys["data.train_batch_size"] is False
    assert "data" not in keys
