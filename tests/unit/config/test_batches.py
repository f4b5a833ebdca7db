"""Prompts, samples and tokens: what must divide what."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig
from caldera.config.batches import check_batches, choose_batch_sizes, settle_batch_sizes
from caldera.config.machine import resolve_for_machine
from caldera.errors import ConfigError

Load = Callable[..., PPOTrainerConfig]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


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
    """Without a size, a pass is cut by tokens, unless the key that says so is false."""
    missing = [f"{ACTOR}.use_kl_loss=True", f"{REF}.log_prob_micro_batch_size_per_gpu=1"]
    missing += [f"{group}.{key}=null"]
    config = load(*missing)
    nodes = {"critic": config.critic, ACTOR: config.actor_rollout_ref.actor}
    nodes |= {REF: config.actor_rollout_ref.ref, ROLLOUT: config.actor_rollout_ref.rollout}
    dynamic = {ACTOR: "use_dynamic_bsz", "critic": "use_dynamic_bsz"}
    found = {
        name: getattr(node, dynamic.get(name, "log_prob_use_dynamic_bsz"))
        for name, node in nodes.items()
    }
    assert found == {name: name == group for name in nodes}
    with pytest.raises(ConfigError) as raised:
        load(*missing, f"{group}.{by_tokens}=False")
    message = str(raised.value)
    assert message.startswith(f"{group}.{key}=null: give it a number of samples")
    assert message.endswith(f"{group}.{by_tokens}=True")


def test_micro_batches_by_tokens_need_no_size(load: Load) -> None:
    load(f"{ACTOR}.use_dynamic_bsz=True", without=f"{ACTOR}.ppo_micro_batch_size_per_gpu")


def test_the_reference_needs_a_size_only_where_it_is_used(load: Load) -> None:
    by_samples = f"{ACTOR}.use_dynamic_bsz=False"  # which the others follow
    load(by_samples)
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.ref\.log_prob_micro"):
        load("algorithm.use_kl_in_reward=True", by_samples)


def test_a_size_for_one_pass_of_the_critic_asks_for_the_others(load: Load) -> None:
    """Both passes share the key that would cut them by tokens."""
    one = ["critic.ppo_micro_batch_size_per_gpu=null", "critic.forward_micro_batch_size_per_gpu=4"]
    with pytest.raises(ConfigError, match=r"^critic\.ppo_micro_batch_size_per_gpu=null: give it"):
        load(*one)


GRPO = "algorithm.adv_estimator=grpo"
MINI = f"{ACTOR}.ppo_mini_batch_size"


@pytest.mark.parametrize(
    ("rows", "keys", "sizes"),
    [
        (None, (), (1024, 256)),
        (7473, (), (1024, 256)),
        (1000, (), (768, 256)),
        (255, (), (255, 255)),
        (3, (), (3, 3)),
        (3, ("data.train_batch_size=8",), (8, 8)),  # the loader says that there are too few
        (9, ("data.train_batch_size=300",), (300, 300)),
        (9, ("data.train_batch_size=512",), (512, 256)),
        (1000, (f"{MINI}=100",), (1000, 100)),
        (9999, (f"{MINI}=100",), (1000, 100)),
        (50, (f"{MINI}=8",), (48, 8)),
        (5, (f"{ROLLOUT}.n=3", "trainer.n_gpus_per_node=4"), (4, 4)),
        (5, (f"{ROLLOUT}.n=4", "trainer.n_gpus_per_node=4"), (5, 5)),
        (9, ("data.train_batch_size=768", "trainer.n_gpus_per_node=3"), (768, 768)),
    ],
)
def test_sizes_of_batches_that_are_not_given(
    load: Load, rows: int | None, keys: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    config = load(GRPO, *keys)
    given = [key for key in keys if "batch_size" in key]
    chosen = choose_batch_sizes(config, rows)
    actor = config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == sizes
    assert len(chosen) == 2 - len(given)


def test_the_critics_mini_batch_follows_the_actors(load: Load) -> None:
    config = load()
    assert settle_batch_sizes(config, 100) == [
        "data.train_batch_size=100",
        f"{ACTOR}.ppo_mini_batch_size=100",
        "critic.ppo_mini_batch_size=100",
    ]
    config = load("critic.ppo_mini_batch_size=30")
    assert settle_batch_sizes(config, 100)[0] == "data.train_batch_size=90"
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 90


def test_too_few_rows_for_any_batch(load: Load) -> None:
    config = load(GRPO, f"{MINI}=8")
    with pytest.raises(ConfigError, match=r"^data\.train_batch_size=null: .* 5 rows, .* of 8$"):
        settle_batch_sizes(config, 5)


def test_groups_have_eight_responses_unless_a_key_says_otherwise(load: Load) -> None:
    for keys, n in {
        (GRPO,): 8,
        ("algorithm.adv_estimator=rloo",): 8,
        (GRPO, f"{ROLLOUT}.n=1"): 1,
        (GRPO, f"{ROLLOUT}.n=5"): 5,
        ("algorithm.adv_estimator=gae",): 1,
        ("algorithm.adv_estimator=reinforce_plus_plus",): 1,
        (): 1,
    }.items():
        config = load(*keys)
        assert config.actor_rollout_ref.rollout.n == n
        assert config.critic.rollout_n == n


NO_SIZES = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=null",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null",
    "critic.ppo_micro_batch_size_per_gpu=null",
)


@pytest.mark.parametrize(
    ("gpus", "length", "budgets"),
    [
        (1, 512, (16384, 16384, 16384, 32768, 32768, 32768)),
        (0, 512, (4096, 4096, 4096, 4096, 4096, 4096)),
        (1, 20000, (20512, 20512, 20512, 32768, 32768, 41024)),
        (0, 20000, (20512, 20512, 20512, 20512, 20512, 41024)),
    ],
)
def test_tokens_of_a_micro_batch_suit_the_device_and_hold_the_longest_sample(
    load: Load, gpus: int, length: int, budgets: tuple[int, ...]
) -> None:
    config = load(*NO_SIZES, f"data.max_response_length={length}")
    chosen = resolve_for_machine(config, gpus)
    parts, critic = config.actor_rollout_ref, config.critic
    assert budgets == (
        parts.actor.ppo_max_token_len_per_gpu,
        parts.rollout.log_prob_max_token_len_per_gpu,
        parts.ref.log_prob_max_token_len_per_gpu,
        critic.ppo_max_token_len_per_gpu,
        critic.forward_max_token_len_per_gpu,
        config.reward_model.forward_max_token_len_per_gpu,
    )
    assert [text for text in chosen if "max_token_len" in text] == [  # of passes that are made
        f"{ACTOR}.ppo_max_token_len_per_gpu={budgets[0]}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={budgets[1]}",
        f"critic.ppo_max_token_len_per_gpu={budgets[3]}",
        f"critic.forward_max_token_len_per_gpu={budgets[4]}",
    ]


def test_ranks_that_share_tokens_share_the_default_budget(load: Load) -> None:
    config = load(
        *NO_SIZES,
        "data.max_response_length=40000",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "trainer.n_gpus_per_node=2",
    )
    resolve_for_machine(config, 2)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 20256


def test_a_budget_that_is_given_is_kept(load: Load) -> None:
    config = load(*NO_SIZES, f"{ACTOR}.ppo_max_token_len_per_gpu=2048")
    resolve_for_machine(config, 1)
    parts = config.actor_rollout_ref
    assert parts.actor.ppo_max_token_len_per_gpu == 2048
    assert parts.rollout.log_prob_max_token_len_per_gpu == 2048  # which follows the actor's
    assert config.critic.ppo_max_token_len_per_gpu == 32768


def test_a_mini_batch_in_samples_is_told_apart(load: Load) -> None:
    batch = ["data.train_batch_size=16", f"{ROLLOUT}.n=4"]
    with pytest.raises(
        ConfigError, match=r"counts prompts, not samples: 64 samples are 16 prompts"
    ):
        load(*batch, f"{ACTOR}.ppo_mini_batch_size=64")
    with pytest.raises(ConfigError) as raised:
        load(*batch, f"{ACTOR}.ppo_mini_batch_size=65")
    assert "not samples" not in str(raised.value)
    load(*batch, f"{ACTOR}.ppo_mini_batch_size=16")


@pytest.mark.parametrize(
    ("group", "size", "needs"),
    [
        (ACTOR, "ppo_micro_batch_size", ""),
        (ROLLOUT, "log_prob_micro_batch_size", ""),
        (REF, "log_prob_micro_batch_size", f"{ACTOR}.use_kl_loss=True"),
        ("critic", "ppo_micro_batch_size", ""),
    ],
)
def test_deprecated_sizes_are_honoured(
    load: Load, caplog: pytest.LogCaptureFixture, group: str, size: str, needs: str
) -> None:
    more = [needs] if needs else []
    with caplog.at_level(logging.WARNING):
        config = load(*more, f"{group}.{size}=8", f"{group}.{size}_per_gpu=null")
    parts = {"critic": config.critic, ACTOR: config.actor_rollout_ref.actor}
    parts |= {REF: config.actor_rollout_ref.ref, ROLLOUT: config.actor_rollout_ref.rollout}
    assert getattr(parts[group], f"{size}_per_gpu") == 8
    assert caplog.messages == [
        f"{group}.{size} is deprecated; {group}.{size}_per_gpu=8 says the same"
    ]


def test_deprecated_sizes_are_shared_out(load: Load) -> None:
    config = load(f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8")
    config.trainer.n_gpus_per_node = 2
    actor = config.actor_rollout_ref.actor
    with pytest.raises(ConfigError, match=r"=8 samples over all devices .*=8 samples on each"):
        check_batches(config)
    actor.ppo_micro_batch_size_per_gpu = None
    check_batches(config)
    assert actor.ppo_micro_batch_size_per_gpu == 4
    actor.ppo_micro_batch_size, actor.ppo_micro_batch_size_per_gpu = 7, None
    with pytest.raises(ConfigError, match=r"=7 samples cannot be shared by 2 devices$"):
        check_batches(config)


def test_the_critics_forward_size_follows_its_deprecated_one(load: Load) -> None:
    deprecated = ["critic.ppo_micro_batch_size=8", "critic.ppo_micro_batch_size_per_gpu=null"]
    assert load(*deprecated).critic.forward_micro_batch_size_per_gpu == 8
    own = load(*deprecated, "critic.forward_micro_batch_size_per_gpu=16").critic
    assert (own.ppo_micro_batch_size_per_gpu, own.forward_micro_batch_size_per_gpu) == (8, 16)


@pytest.mark.parametrize(
    ("group", "dynamic", "tokens"),
    [
        (ACTOR, "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
        (ROLLOUT, "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        ("critic", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
    ],
)
def test_a_token_budget_holds_the_longest_sample(
    load: Load, group: str, dynamic: str, tokens: str
) -> None:
    lengths = [
        "data.max_prompt_length=60",
        "data.max_response_length=40",
        f"{group}.{dynamic}=True",
    ]
    load(*lengths, f"{group}.{tokens}=100")
    with pytest.raises(ConfigError, match=rf"^{group}\.{tokens}=99 tokens .*; takes at least 100$"):
        load(*lengths, f"{group}.{tokens}=99")
    load(*lengths[:2], f"{group}.{tokens}=99")


def test_samples_are_shared_by_the_devices(load: Load) -> None:
    config = load("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", f"{ROLLOUT}.n=2")
    config.trainer.n_gpus_per_node = 8
    with pytest.raises(ConfigError, match=r"n=2 = 12 samples cannot be shared by 8 devices"):
        check_batches(config)
    config.trainer.n_gpus_per_node = 4
    check_batches(config)


@pytest.mark.parametrize("key", [f"{ACTOR}.rollout_n", f"{REF}.rollout_n", "critic.rollout_n"])
def test_answers_per_prompt_are_set_in_one_place(load: Load, key: str) -> None:
    load(f"{key}=4", f"{ROLLOUT}.n=4")
    with pytest.raises(ConfigError, match=rf"^{key}=4 and {ROLLOUT}\.n=8 are both responses"):
        load(f"{key}=4", f"{ROLLOUT}.n=8")
