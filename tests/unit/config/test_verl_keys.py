"""Every key of verl 0.5 to 0.7 exists here, with verl's default or a stated reason for another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from caldera.config import load_config
from caldera.config.migrate import VERLS_DEFAULTS, is_target
from caldera.errors import ConfigError
from tests.unit.config.verl_facts import (
    ABSENT,
    FILES,
    as_override,
    caldera_defaults,
    facts,
    is_known,
    look_up,
    tree_of,
    verl_defaults,
)

FROM_MACHINE = "chosen from the machine"
NO_MODEL = "there is no default model; the user names one"
NO_DATA = "there is no default data; the user names it"
ONE_DEVICE = "a worker has one device"
OFF_UNLESS_ASKED = "without them a batch does not depend on what was sampled before it"
PACKED = "sequences are always packed without padding"
TWO_GROUPS = "a free dictionary that starts empty; both groups may be given"
ROWS_ARE_READY = "rows of text are ready sooner than worker processes are"

MORE_KEYS = "two more keys, which are refused"
OVERRIDES = {
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "recompute_method": None,
    "recompute_num_layers": None,
    "attention_backend": "flash",
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}

BY_TOKENS = "by tokens where verl asks for a size"
TOKENS = "verl's on a GPU, fewer on a CPU, more for a longer sample"
FROM_ROWS = "verl's, or what a smaller data set or batch has"
EVERYWHERE: dict[str, tuple[Any, str]] = {
    "data.train_batch_size": (None, FROM_ROWS),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (None, FROM_ROWS),
    "critic.ppo_mini_batch_size": (None, FROM_ROWS),
    "actor_rollout_ref.actor.use_dynamic_bsz": (None, BY_TOKENS),
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": (None, BY_TOKENS),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": (None, BY_TOKENS),
    "critic.use_dynamic_bsz": (None, BY_TOKENS),
    "reward_model.use_dynamic_bsz": (None, BY_TOKENS),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (None, TOKENS),
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": (None, TOKENS),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": (None, TOKENS),
    "critic.ppo_max_token_len_per_gpu": (None, TOKENS),
    "critic.forward_max_token_len_per_gpu": (None, TOKENS),
    "reward_model.forward_max_token_len_per_gpu": (None, TOKENS),
    "data.train_files": (None, NO_DATA),
    "data.val_files": (None, NO_DATA),
    "data.dataloader_num_workers": (0, ROWS_ARE_READY),
    "actor_rollout_ref.model.path": (None, NO_MODEL),
    "actor_rollout_ref.rollout.dtype": (None, FROM_MACHINE),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (1, ONE_DEVICE),
    "actor_rollout_ref.rollout.enable_chunked_prefill": (False, OFF_UNLESS_ASKED),
    "actor_rollout_ref.rollout.enable_prefix_caching": (False, OFF_UNLESS_ASKED),
    "actor_rollout_ref.rollout.calculate_log_probs": (
        True,
        "sampler and trainer are always compared",
    ),
    "actor_rollout_ref.rollout.prometheus.served_model_name": (None, NO_MODEL),
    "critic.model.path": (None, NO_MODEL),
    "critic.model.tokenizer_path": (None, NO_MODEL),
    "reward_model.model.input_tokenizer": (None, NO_MODEL),
    "reward_model.rollout.dtype": (None, FROM_MACHINE),
    "reward_model.rollout.enable_chunked_prefill": (False, OFF_UNLESS_ASKED),
    "reward_model.rollout.enable_prefix_caching": (False, OFF_UNLESS_ASKED),
    "reward_model.num_workers": (None, "as many as suit the manager"),
    "trainer.project_name": ("caldera_examples", "the project's own name"),
    "trainer.default_local_dir": ("checkpoints/caldera_examples/gsm8k", "follows project_name"),
    "trainer.logger": (["console", "file"], "wandb wants an account; a file needs nothing"),
    "trainer.n_gpus_per_node": (None, FROM_MACHINE),
    "trainer.device": (None, FROM_MACHINE),
}
DIFFERENT: dict[str, dict[str, tuple[Any, str]]] = {
    "ppo_trainer": {
        **EVERYWHERE,
        "actor_rollout_ref.actor.fsdp_config.dtype": (None, FROM_MACHINE),
        "actor_rollout_ref.ref.fsdp_config.dtype": (None, FROM_MACHINE),
        "critic.model.fsdp_config.dtype": (None, FROM_MACHINE),
        "critic.model.use_remove_padding": (True, PACKED),
        "actor_rollout_ref.actor.optim.override_optimizer_config": ({}, "null says the same"),
        "critic.optim.override_optimizer_config": ({}, "null says the same"),
    },
    "ppo_megatron_trainer": {
        **EVERYWHERE,
        "actor_rollout_ref.actor.megatron.dtype": (None, FROM_MACHINE),
        "actor_rollout_ref.ref.megatron.dtype": (None, FROM_MACHINE),
        "actor_rollout_ref.ref.megatron.override_transformer_config": (OVERRIDES, MORE_KEYS),
        "reward_model.megatron.override_transformer_config": (OVERRIDES, MORE_KEYS),
        "critic.megatron.dtype": (None, FROM_MACHINE),
        "reward_model.megatron.dtype": (None, FROM_MACHINE),
        "actor_rollout_ref.model.use_remove_padding": (True, PACKED),
        "actor_rollout_ref.model.override_config.model_config": (ABSENT, TWO_GROUPS),
        "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": (
            ABSENT,
            TWO_GROUPS,
        ),
        "critic.model.override_config.model_config": (ABSENT, TWO_GROUPS),
        "critic.model.override_config.moe_config.freeze_moe_router": (ABSENT, TWO_GROUPS),
    },
}
"""Keys whose default is not verl's -> (the default here, why)."""


def test_the_tables_are_whole() -> None:
    assert [len(facts("classic", name)) for name in FILES] == [556, 608]
    assert [len(facts("head", name)) for name in FILES] == [897, 947]


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_known(name: str) -> None:
    assert [key for key in facts("classic", name) if not (is_known(key) or is_target(key))] == []


@pytest.mark.parametrize("name", FILES)
def test_every_default_is_verls_but_for_those_that_are_stated(name: str) -> None:
    own = {key: look_up(caldera_defaults(name), key) for key in facts("classic", name)}
    found = {
        key: own[key]
        for key, default in verl_defaults("classic", name)
        # 1 and 1.0 are the same, 1 and true are not.
        if own[key] != default or isinstance(own[key], bool) is not isinstance(default, bool)
    }
    assert found == {key: value for key, (value, _) in DIFFERENT[name].items()}
    assert all(reason for _, reason in DIFFERENT[name].values())


def test_what_is_told_of_defaults_that_differ() -> None:
    """Those that a run may notice; the others are required, or say the same."""
    of_verl = dict(verl_defaults("classic", "ppo_trainer"))
    assert {key: of_verl[key] for key in VERLS_DEFAULTS} == VERLS_DEFAULTS
    same = {
        key
        for key, (_, why) in DIFFERENT["ppo_trainer"].items()
        if why in (NO_MODEL, NO_DATA, PACKED, BY_TOKENS, TOKENS, FROM_ROWS, "null says the same")
        or key.startswith("reward_model.")
        or key.endswith("fsdp_config.dtype")
    }
    assert DIFFERENT["ppo_trainer"].keys() - same == VERLS_DEFAULTS.keys()


def test_every_default_of_verls_may_be_given(required: list[str]) -> None:
    overrides = _defaults_as_overrides("ppo_trainer")
    assert len(overrides) == 556 - len(DIFFERENT["ppo_trainer"])
    # It follows the size above, which the required keys set: null would leave it without one.
    forward = "critic.forward_micro_batch_size_per_gpu=4"
    assert _refusals(overrides, [*required, forward]) == {}


def test_every_megatron_default_of_verls_may_be_given(required: list[str]) -> None:
    name = "ppo_megatron_trainer"
    overrides = _defaults_as_overrides(name)
    assert len(overrides) == 608 - len(DIFFERENT[name])
    assert _refusals(overrides, required, name) == {}
    stated = [key for key, (_, why) in DIFFERENT[name].items() if why == TWO_GROUPS]
    values = dict(verl_defaults("classic", name))
    stated += [key for key, (_, why) in DIFFERENT[name].items() if why == MORE_KEYS]
    given = [as_override(key, values[key]) for key in stated]
    assert len(given) == 6
    assert load_config([*given, *required], name) == load_config(required, name)


def _defaults_as_overrides(name: str) -> list[str]:
    classes = {key: value for key, value in facts("classic", name).items() if is_target(key)}
    values = {**classes, **dict(verl_defaults("classic", name))}
    return [as_override(key, values[key]) for key in values if key not in DIFFERENT[name]]


def _refusals(
    overrides: Sequence[str], required: list[str], name: str = "ppo_trainer"
) -> dict[str, str]:
    """The overrides that do not load, with what is said of them."""
    try:
        load_config([*overrides, *required], name)
    except ConfigError as error:
        if len(overrides) == 1:
            return {overrides[0]: str(error)}
        half = len(overrides) // 2
        return _refusals(overrides[:half], required, name) | _refusals(
            overrides[half:], required, name
        )
    return {}


@pytest.mark.parametrize("name", FILES)
def test_a_copy_of_verls_own_file_loads(tmp_path: Path, required: list[str], name: str) -> None:
    """With its references between keys, and between groups."""
    values = facts("classic", name)
    kept = {
        key: value
        for key, value in values.items()
        if key not in DIFFERENT[name] or DIFFERENT[name][key][1] == MORE_KEYS
    }
    (tmp_path / "verls.yaml").write_text(OmegaConf.to_yaml(tree_of(kept)))
    assert load_config(required, "verls", str(tmp_path)) == load_config(required, name)
