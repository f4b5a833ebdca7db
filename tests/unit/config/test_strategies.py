"""What strategy=megatron takes, and what it makes of the other keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from caldera.config import (
    PPOTrainerConfig,
    annotated_yaml,
    load_config,
    resolve_for_machine,
)
from caldera.config.batches import check_batches
from caldera.errors import ConfigError, UnsupportedError

Load = Callable[..., PPOTrainerConfig]
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
TENSOR = "megatron.tensor_model_parallel_size"
PIPELINE = "megatron.pipeline_model_parallel_size"
CONTEXT = "megatron.context_parallel_size"
STRATEGIES = [f"{ACTOR}.strategy", f"{REF}.strategy", "critic.strategy", "reward_model.strategy"]


@pytest.fixture
def load_megatron(required: list[str]) -> Load:
    """Load on top of Megatron's own file, whose sizes of a reference are given too."""
    log_probs = f"{REF}.log_prob_micro_batch_size_per_gpu=4"

    def make(*overrides: str) -> PPOTrainerConfig:
        return load_config([*required, log_probs, *overrides], "ppo_megatron_trainer")

    return make


@pytest.mark.parametrize("key", STRATEGIES)
def test_every_role_takes_megatron(load: Load, key: str) -> None:
    load(f"{key}=megatron", "reward_model.enable=True", "reward_model.micro_batch_size_per_gpu=4")


def test_megatrons_own_file_loads_and_is_shown(load_megatron: Load) -> None:
    config = load_megatron()
    parts = config.actor_rollout_ref
    roles = (parts.actor, parts.ref, config.critic, config.reward_model)
    assert [role.strategy for role in roles] == ["megatron"] * 4
    assert (parts.actor.optim.optimizer, config.critic.optim.optimizer) == ("adam", "adam")
    shown = annotated_yaml(config)
    assert "tensor_model_parallel_size: 1" in shown
    assert "Ranks that share the matrices of each layer." in shown


def test_the_reference_lies_as_the_actor_does(load_megatron: Load) -> None:
    layout = (f"{ACTOR}.{TENSOR}=2", f"{ACTOR}.{PIPELINE}=4", f"{ACTOR}.megatron.seed=7")
    config = load_megatron(*layout, "algorithm.adv_estimator=grpo")
    ref = config.actor_rollout_ref.ref.megatron
    assert (ref.tensor_model_parallel_size, ref.pipeline_model_parallel_size) == (2, 4)
    assert ref.seed == 7
    assert ref.ranks_of_a_copy == 8


def test_the_optimiser_goes_by_megatrons_names(load: Load) -> None:
    actor = f"{ACTOR}.strategy=megatron"
    for given, found in {"AdamW": "adam", "adam": "adam", "SGD": "sgd", "sgd": "sgd"}.items():
        config = load(actor, f"{ACTOR}.optim.optimizer={given}")
        assert config.actor_rollout_ref.actor.optim.optimizer == found
    assert load().actor_rollout_ref.actor.optim.optimizer == "AdamW"


def test_models_that_are_not_there_may_be_laid_out_otherwise(load_megatron: Load) -> None:
    tensor = ("trainer.n_gpus_per_node=8", f"{ACTOR}.{TENSOR}=2")
    load_megatron(*tensor, "algorithm.adv_estimator=grpo")
    with pytest.raises(ConfigError, match=rf"^critic\.{TENSOR}=1 and {ACTOR}\.{TENSOR}=2: "):
        load_megatron(*tensor)
    with pytest.raises(ConfigError, match=rf"^{REF}\.{CONTEXT}=2 and {ACTOR}\.{CONTEXT}=1: "):
        load_megatron(*tensor, "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True",
                      f"{REF}.{CONTEXT}=2")  # fmt: skip


def test_a_reward_model_of_its_own_pool_lies_as_it_likes(load_megatron: Load) -> None:
    scored = (
        "trainer.n_gpus_per_node=4",
        "reward_model.enable=True",
        "reward_model.micro_batch_size_per_gpu=4",
        f"reward_model.{TENSOR}=2",
    )
    with pytest.raises(ConfigError, match=rf"^reward_model\.{TENSOR}=2 and {ACTOR}\.{TENSOR}=1: "):
        load_megatron(*scored)
    pool = ("reward_model.enable_resource_pool=True", "reward_model.nnodes=1")
    load_megatron(*scored, *pool, "reward_model.n_gpus_per_node=2")
    devices = r"reward_model\.n_gpus_per_node x reward_model\.nnodes"
    with pytest.raises(ConfigError, match=rf"= 2 ranks do not divide the 3 devices \({devices}\)$"):
        load_megatron(*scored, *pool, "reward_model.n_gpus_per_node=3")


def test_another_engine_beside_megatron(load_megatron: Load) -> None:
    fsdp2 = ("critic.strategy=fsdp2", "critic.optim.optimizer=AdamW")
    memory = "critic.model.fsdp_config.param_offload=True"
    load_megatron(f"{ACTOR}.{TENSOR}=2", *fsdp2, memory)


def test_ranks_are_counted_when_the_machine_is_known(load_megatron: Load) -> None:
    """A machine's GPUs are its ranks unless the config says otherwise."""
    config = load_megatron(f"{ACTOR}.{TENSOR}=2", f"critic.{TENSOR}=2")
    resolve_for_machine(config, gpus=4)
    config = load_megatron(f"{ACTOR}.{TENSOR}=2", f"critic.{TENSOR}=2")
    with pytest.raises(ConfigError, match=rf"^{ACTOR}\.{TENSOR}=2 .* do not divide the 1 devices"):
        resolve_for_machine(config, gpus=0)


def test_rows_are_shared_by_copies_of_the_model(load_megatron: Load) -> None:
    layout = ("trainer.n_gpus_per_node=8", f"{ACTOR}.{TENSOR}=2", f"{ACTOR}.{PIPELINE}=2")
    batch = ("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", f"{ROLLOUT}.n=1")
    grpo = "algorithm.adv_estimator=grpo"
    load_megatron(grpo, *layout, *batch)
    with pytest.raises(ConfigError, match=r"= 6 samples cannot be shared by 4 groups of 2 devices"):
        load_megatron(grpo, *layout[:2], *batch)


def test_deprecated_sizes_are_shared_by_copies_of_the_model(load_megatron: Load) -> None:
    layout = ("trainer.n_gpus_per_node=8", f"{ACTOR}.{TENSOR}=2", f"critic.{TENSOR}=2")
    sizes = (f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=null")
    config = load_megatron(*layout, *sizes)
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2


def test_ranks_that_share_tokens_share_the_budget(load_megatron: Load) -> None:
    config = load_megatron(
        "data.max_prompt_length=60", "data.max_response_length=40", f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.{CONTEXT}=2", "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_max_token_len_per_gpu=50",
    )  # fmt: skip
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 49
    with pytest.raises(ConfigError, match=r"=49 x 2 ranks = 98 tokens cannot hold"):
        check_batches(config)


@pytest.mark.parametrize(("gpus", "dtype"), [(0, "float32"), (1, "bfloat16")])
def test_the_precision_is_the_machines(load_megatron: Load, gpus: int, dtype: str) -> None:
    config = load_megatron()
    chosen = resolve_for_machine(config, gpus)
    roles = (ACTOR, REF, "critic", "reward_model")
    assert [line for line in chosen if "dtype" in line] == [
        *(f"{role}.megatron.dtype={dtype}" for role in roles),
        f"{ROLLOUT}.dtype={dtype}",
    ]
    assert config.critic.megatron.dtype == dtype


def test_a_given_precision_is_the_samplers_too(load_megatron: Load) -> None:
    config = load_megatron(f"{ACTOR}.megatron.dtype=bfloat16")
    resolve_for_machine(config, gpus=0)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.actor_rollout_ref.ref.megatron.dtype == "float32"


def test_verls_groups_of_overrides_are_the_models(load_megatron: Load) -> None:
    override = "actor_rollout_ref.model.override_config"
    config = load_megatron(
        f"{override}.model_config.max_position_embeddings=64",
        f"{override}.moe_config.freeze_moe_router=False",
    )
    model = config.actor_rollout_ref.model
    assert model.override_config == {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.optim.lr_warmup_init=1e-9",
        f"{ACTOR}.optim.lr_decay_steps=9",
        f"{ACTOR}.optim.min_lr=1e-9",
        f"{ACTOR}.optim.lr_wsd_decay_style=linear",
        f"{ACTOR}.optim.lr_wsd_decay_steps=3",
        f"{ACTOR}.megatron.dtype=float32",
        f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
        f"{REF}.{TENSOR}=2",
        "critic.megatron.sequence_parallel=False",
    ],
)
def test_keys_of_megatron_are_never_ignored(load: Load, load_megatron: Load, override: str) -> None:
    """With megatron they are taken; with another strategy the first is named."""
    load_megatron(override, "trainer.n_gpus_per_node=2")
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}.*is a key of megatron; .*strategy='fsdp'"):
        load(override)


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.optim.warmup_style=cosine",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
        f"{ACTOR}.optim.num_cycles=1",
        f"{ACTOR}.optim.optimizer_impl=torchao.optim",
        f"{REF}.fsdp_config.fsdp_size=2",
        f"{REF}.ulysses_sequence_parallel_size=2",
        "critic.grad_clip=2",
        "reward_model.model.fsdp_config.param_offload=True",
    ],
)
def test_keys_of_the_others_are_not_ignored_either(load_megatron: Load, override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=.*is a key of local, fsdp and fsdp2; "):
        load_megatron(override)


def test_full_kl_in_the_reward_is_refused(load_megatron: Load) -> None:
    reward = "algorithm.use_kl_in_reward=True"
    with pytest.raises(UnsupportedError, match=r"^algorithm\.kl_penalty='full' is not supported"):
        load_megatron(reward, "algorithm.kl_penalty=full")
    load_megatron(reward, "algorithm.kl_penalty=k3")
