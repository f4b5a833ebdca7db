"""Options of other libraries lead to the keys that stand for them."""

from __future__ import annotations

import pytest

from caldera.config import SFTTrainerConfig, known_keys
from caldera.config.loader import SCHEMAS
from caldera.config.offline import GenerationConfig
from caldera.config.suggest import OF_TRAINING, aliases, did_you_mean
from caldera.trainer.main_ppo import TRAIN


def test_every_place_of_an_alias_is_a_key() -> None:
    known = {key for schema in SCHEMAS.values() for key in known_keys(schema)}
    for name, alias in aliases().items():
        assert {place.partition("=")[0] for place in alias.places} <= known, name
        assert alias.places or alias.note, name


def test_no_alias_is_a_key_itself() -> None:
    assert not set(aliases()) & set(known_keys())


def test_a_command_is_pointed_at_its_own_keys() -> None:
    keys = known_keys(SFTTrainerConfig)
    assert did_you_mean("learning_rate", keys, {}) == "; did you mean optim.lr?"
    assert did_you_mean("num_train_epochs", keys, {}) == "; did you mean trainer.total_epochs?"
    assert "rollout" not in did_you_mean("num_generations", keys, {})


@pytest.mark.parametrize("key", ["min_p", "repetition_penalty"])
def test_sampling_parameters_outside_their_group_lead_to_it(key: str) -> None:
    keys = known_keys(GenerationConfig)
    assert did_you_mean(key, keys, {}) == f"; did you mean rollout.{key}?"


def test_names_of_other_groups_must_be_almost_the_same() -> None:
    keys = ["trainer.log_val_generations", "critic.optim.num_cycles"]
    assert did_you_mean("data.log_val_generation", keys, {}).endswith("log_val_generations?")
    assert did_you_mean("data.num_cpus", keys, {}) == ""


@pytest.mark.parametrize("option", ["--n_samples_per_prompt", "--n-samples-per-prompt"])
def test_an_option_of_openrlhf_is_answered_with_a_key(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        TRAIN.read([option, "8"])
    told = capsys.readouterr().err
    assert f"{option} is no option: values are written key=value" in told
    assert "did you mean actor_rollout_ref.rollout.n?" in told


def test_every_key_in_a_note_is_a_key() -> None:
    known = set(known_keys())
    for name, alias in aliases().items():
        assert set(OF_TRAINING.findall(alias.note)) <= known, name


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("max_epochs", "trainer.total_epochs"),
        ("train_batch_size", "data.train_batch_size"),
        ("tensor_parallel_size", "model.fsdp_config.tensor_parallel_size"),
    ],
)
def test_a_note_about_other_keys_is_left_out(option: str, key: str) -> None:
    assert did_you_mean(option, known_keys(SFTTrainerConfig), {}) == f"; did you mean {key}?"


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
        ("actor.ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
        ("critic.optimizer.ppo_epochs", "critic.ppo_epochs"),
        ("actor_rollout_ref.ref.micro_batch_size",
         "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
        ("critic.micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
        ("no_advantage_std_norm", "algorithm.norm_adv_by_std_in_grpo=False"),
        ("do_eval", "trainer.test_freq"),
        ("max_user_turns", "actor_rollout_ref.rollout.multi_turn.max_user_turns"),
    ],
)  # fmt: skip
def test_the_key_of_the_named_role_is_meant_else_the_policys(option: str, key: str) -> None:
    assert did_you_mean(option, known_keys(), {}) == f"; did you mean {key}?"


ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("stop_strings", f"{ROLLOUT}.stop?"),
        (f"{ROLLOUT}.stop_strings", f"{ROLLOUT}.stop?"),
        ("eos_token_id", f"{ROLLOUT}.stop_token_ids? (beside the model's end tokens)"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef? (with algorithm.use_kl_in_reward=True)"),
        # Older verl.
        ("actor_rollout_ref.actor.use_token_level_loss",
         "actor_rollout_ref.actor.loss_agg_mode=token-mean?"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap",
         f"{CORRECTION}.rollout_is_threshold? (with {CORRECTION}.rollout_is=token)"),
        ("algorithm.rollout_is_level", f"{CORRECTION}.rollout_is?"),
        (f"{ROLLOUT}.multi_turn.max_turns", f"{ROLLOUT}.multi_turn.max_assistant_turns?"),
        (f"{ROLLOUT}.n_val", f"{ROLLOUT}.val_kwargs.n? (with {ROLLOUT}.val_kwargs.do_sample=True)"),
    ],
)  # fmt: skip
def test_options_of_sampling_and_of_older_verl(option: str, hint: str) -> None:
    assert did_you_mean(option, known_keys(), {}) == f"; did you mean {hint}"


@pytest.mark.parametrize("key", ["server", "kvcache"])
def test_names_that_are_not_alike_are_no_hint(key: str) -> None:
    assert did_you_mean(f"{ROLLOUT}.{key}", known_keys(), {}) == ""


@pytest.mark.parametrize("option", ["normalize_reward", "mask_truncated_completions"])
def test_what_has_no_key_is_answered_with_a_reason(option: str) -> None:
    told = did_you_mean(option, known_keys(), {})
    assert told.startswith(": ") and "did you mean" not in told


def test_servers_elsewhere_are_hinted_at_where_they_are_taken() -> None:
    """Training refuses actor_rollout_ref.rollout.remote.url."""
    assert "remote.url" not in did_you_mean("vllm_server_host", known_keys(), {})
    assert did_you_mean("vllm_server_host", known_keys(GenerationConfig), {}) == (
        "; did you mean rollout.remote.url?"
    )
