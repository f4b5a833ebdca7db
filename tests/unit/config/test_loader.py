"""From YAML files and overrides to a typed config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from caldera.config import (
    CONFIG_DIR,
    PPOTrainerConfig,
    compose_config,
    config_to_dict,
    config_to_yaml,
    known_keys,
    load_config,
)
from caldera.config.loader import SCHEMAS
from caldera.errors import ConfigError, UnknownKeyError, UnsupportedError

Load = Callable[..., PPOTrainerConfig]


def test_every_yaml_file_loads() -> None:
    assert sorted(SCHEMAS) == sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))
    for name, schema in SCHEMAS.items():
        assert isinstance(compose_config([], name, None, schema), schema)


def test_a_command_takes_its_own_files_alone() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config([], "generation")
    assert str(raised.value) == (
        "--config-name=generation: this command takes ppo_trainer, ppo_megatron_trainer"
    )


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
        f"{actor}.ppo_max_token_len_per_gpu=2048",
    ).actor_rollout_ref
    assert config.ref.strategy == "fsdp2"
    for part in (config.ref, config.rollout):
        assert (part.log_prob_use_dynamic_bsz, part.log_prob_max_token_len_per_gpu) == (True, 2048)


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
        ("actor_rollout_ref.actor.lr=0.1", "actor_rollout_ref.actor.optim.lr"),
        ("critic.path=M", "critic.model.path"),
        ("actor_rollout_ref.rolout.val_kwarg.n=4", "actor_rollout_ref.rollout.val_kwargs.n"),
        ("critic.fsdp.param_ofload=True", "critic.model.fsdp_config.param_offload"),
    ],
)
def test_an_unknown_key_names_the_nearest(load: Load, override: str, guess: str) -> None:
    with pytest.raises(UnknownKeyError) as raised:
        load(override)
    assert str(raised.value).endswith(f"; did you mean {guess}?")


@pytest.mark.parametrize("override", ["zzzzz=1", "zzzzz={}", "zzzzz=null"])
def test_an_unknown_key_without_a_near_one(load: Load, override: str) -> None:
    with pytest.raises(UnknownKeyError, match=r"^unknown config key 'zzzzz'$"):
        load(override)


@pytest.mark.parametrize(
    ("override", "value", "takes"),
    [
        ("data.max_prompt_length=many", "'many'", "takes a whole number (tokens)"),
        ("data.max_prompt_length=1.5", "1.5", "takes a whole number (tokens)"),
        ("data.max_prompt_length=null", "null", "takes a whole number (tokens)"),
        ("data.gen_batch_size=few", "'few'", "takes a whole number (prompts) or null"),
        ("data.shuffle=maybe", "'maybe'", "takes true or false"),
        ("critic.optim.lr=fast", "'fast'", "takes a number"),
        ("critic.optim.betas=[a,b]", "['a', 'b']", "takes a list of numbers, such as [0.9,0.99]"),
        ("trainer.logger=5", "5", "takes text or a list of texts, such as [a,b]"),
        ("trainer=fast", "'fast'", "is a group; set its keys, such as trainer.project_name=..."),
    ],
)
def test_a_wrong_type_names_key_and_value(
    load: Load, override: str, value: str, takes: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(override)
    key = override.partition("=")[0]
    assert str(raised.value) == f"{key}={value}: {takes}"


@pytest.mark.timeout(20)
def test_a_wrong_type_is_named_under_a_debugger(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OC_CAUSE", "1")  # OmegaConf links errors as it does where it is traced
    with pytest.raises(ConfigError, match=r"^critic\.optim\.betas=.*: takes a list of numbers"):
        load("critic.optim.betas=[a,b]")


@pytest.mark.parametrize("override", ["data={}", "critic.fsdp={}", "distillation={}"])
def test_a_group_may_be_empty(load: Load, override: str) -> None:
    assert load(override) == load()


def test_a_group_may_refer_to_another(load: Load) -> None:
    rollout = "actor_rollout_ref.rollout"
    config = load(f"{rollout}.mtp=${{actor_rollout_ref.model.mtp}}")
    assert config.actor_rollout_ref.rollout.mtp == config.actor_rollout_ref.model.mtp
    with pytest.raises(ConfigError, match=r"val_kwargs=.*: Interpolation key 'nowhere' not found"):
        load(f"{rollout}.val_kwargs=${{nowhere}}")


def test_question_marks_are_a_value_that_is_not_given(load: Load) -> None:
    assert load("actor_rollout_ref.rollout.name=???").actor_rollout_ref.rollout.name is None
    with pytest.raises(ConfigError, match=r"^data\.train_files is required"):
        load("data.train_files=???")


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


@pytest.mark.parametrize("override", ["data.shuffle", "data.shuffle=[1", "a b=3", "=3", ""])
def test_what_is_no_override_is_shown(load: Load, override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(override)
    assert repr(override) in str(raised.value)


@pytest.mark.parametrize("value", ["<info>", "a=b", "<it's>", "<back\\slash\\", "<\\'"])
def test_values_that_a_shell_took_the_quotes_from(load: Load, value: str) -> None:
    assert load(f"data.prompt_key={value}").data.prompt_key == value


def test_an_interpolation_that_leads_nowhere(load: Load) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^data\.max_prompt_length='\${data\.nothing}': .*'data\.nothing' not found",
    ):
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [1\n", r"^--config-name=mine: .*mine\.yaml\", line 2"),
        ("trainer:\n  save_freq: 1\n  save_freq: 2\n", r"found duplicate key save_freq"),
        ("defaults: [nowhere, _self_]\n", r"^In 'mine': Could not load 'nowhere'\.$"),
        ("- data\n", r"^primary config 'mine' must be a DictConfig, got ListConfig$"),
        ("trainer:\n", r"^trainer=null: is a group; set its keys, such as trainer\."),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config([], "mine", str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_file_of_the_users_may_stand_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer:\n  save_freq: 8\n")
    config = compose_config([], "mine", str(tmp_path), PPOTrainerConfig)
    default = compose_config([], "ppo_trainer", None, PPOTrainerConfig)
    assert config.trainer.save_freq == 8
    config.trainer.save_freq = default.trainer.save_freq
    assert config == default


def test_a_group_chooses_its_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("train_batch_size: 6\n")
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    config = compose_config(["data=mine"], "run", str(tmp_path), PPOTrainerConfig)
    assert config.data.train_batch_size == 6
    with pytest.raises(ConfigError, match=r"^data='other': takes one of legacy_data, mine \("):
        compose_config(["data=other"], "run", str(tmp_path), PPOTrainerConfig)
    config = compose_config(["model_engine=megatron"], "ppo_trainer", None, PPOTrainerConfig)
    assert config == compose_config([], "ppo_megatron_trainer", None, PPOTrainerConfig)
    assert config.critic.strategy == "megatron"


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
    for defaults in ("", "defaults: [ppo_trainer, _self_]\n"):
        (tmp_path / "again.yaml").write_text(defaults + text)
        assert load_config([], "again", str(tmp_path)) == config
    correction = "algorithm.rollout_correction.rollout_is=token"
    assert load_config([correction], "again", str(tmp_path)) == load(
        "data.max_prompt_length=7",
        "actor_rollout_ref.model.override_config.depth=3",
        correction,
    )


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


@pytest.mark.parametrize(("group", "key"), [("critic", "enable"), ("reward_model", "enable")])
def test_null_switches_a_group_off(load: Load, tmp_path: Path, group: str, key: str) -> None:
    grpo = "algorithm.adv_estimator=grpo"
    assert load(grpo, f"{group}=null")[group][key] is False
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{group}: null\n")
    assert compose_config([grpo], "mine", str(tmp_path), PPOTrainerConfig)[group][key] is False


def test_null_takes_a_custom_reward_function_back(load: Load) -> None:
    assert load("custom_reward_function=null").custom_reward_function.path is None


NULL_GROUPS = {
    "algorithm.rollout_correction": ("rollout_is=token", "rollout_rs=null", "preset=null"),
    "data.sampler": ("class_path=mine.py", "class_name=Mine"),
    "data.custom_cls": ("path=mine.py", "name=Mine"),
    "actor_rollout_ref.rollout.trace": ("backend=mlflow",),
    "global_profiler": ("tool=torch", "steps=[1]"),
}


@pytest.mark.parametrize("group", NULL_GROUPS)
def test_null_takes_back_what_a_file_sets_in_a_group(
    load: Load, tmp_path: Path, group: str
) -> None:
    plain = compose_config([], "ppo_trainer", None, PPOTrainerConfig)
    assert compose_config([f"{group}=null"], "ppo_trainer", None, PPOTrainerConfig) == plain
    keys = [f"{group}.{text}" for text in NULL_GROUPS[group]]
    given = OmegaConf.from_dotlist(keys)
    text = f"defaults: [ppo_trainer, _self_]\n{OmegaConf.to_yaml(given)}"
    (tmp_path / "mine.yaml").write_text(text)
    folder = str(tmp_path)
    assert compose_config([], "mine", folder, PPOTrainerConfig) != plain
    assert compose_config([f"{group}=null"], "mine", folder, PPOTrainerConfig) == plain
    (tmp_path / "none.yaml").write_text(
        f"defaults: [ppo_trainer, _self_]\n"
        f"{OmegaConf.to_yaml(OmegaConf.from_dotlist([f'{group}=null']))}"
    )
    assert compose_config([], "none", folder, PPOTrainerConfig) == plain


def test_precisions_are_written_long_or_short(load: Load) -> None:
    roles = ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config")
    for role in roles:
        long = load(f"{role}.model_dtype=bfloat16", f"{role}.dtype=bfloat16")
        assert long == load(f"{role}.model_dtype=bf16", f"{role}.dtype=bf16")
    rollout = "actor_rollout_ref.rollout.dtype"
    assert load(f"{rollout}=bf16").actor_rollout_ref.rollout.dtype == "bfloat16"
    assert load(f"{rollout}=fp32").actor_rollout_ref.rollout.dtype == "float32"
