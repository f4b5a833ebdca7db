"""Keys of stops, min_p and penalties: what they take, and which samplers honour them."""

from __future__ import annotations

import pytest

from caldera.commands import generation_server
from caldera.commands.generate import GENERATE
from caldera.config import PPOTrainerConfig, load_config
from caldera.config.offline import generation_sampler
from caldera.errors import CalderaError

ROLLOUT = "actor_rollout_ref.rollout"
KEYS = {
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "stop_token_ids": [7, 9],
    "stop": ["</answer>", "\n\n"],
}
GIVEN = (
    "min_p=0.05", "repetition_penalty=1.1", "presence_penalty=-0.5", "frequency_penalty=0.25",
    "stop_token_ids=[7,9]", 'stop=["</answer>","\n\n"]',
)  # fmt: skip


def load(*overrides: str) -> PPOTrainerConfig:
    return load_config(
        [
            "data.train_files=a", "data.val_files=a", "data.train_batch_size=4",
            "actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo",
            *overrides,
        ]
    )  # fmt: skip


def test_a_run_has_the_keys() -> None:
    rollout = load(
        *(f"{ROLLOUT}.{text}" for text in GIVEN), f"{ROLLOUT}.val_kwargs.min_p=0.1",
        f"{ROLLOUT}.val_kwargs.repetition_penalty=1.2",
    ).actor_rollout_ref.rollout  # fmt: skip
    assert {key: rollout[key] for key in KEYS} == KEYS
    assert (rollout.val_kwargs.min_p, rollout.val_kwargs.repetition_penalty) == (0.1, 1.2)
    assert rollout.val_kwargs.presence_penalty == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("min_p=1.5", "rollout.min_p=1.5: must be from 0 to 1"),
        ("repetition_penalty=0", "rollout.repetition_penalty=0.0: must be more than 0"),
        ("presence_penalty=inf", "rollout.presence_penalty=inf: takes a finite number"),
        ("frequency_penalty=nan", "rollout.frequency_penalty=nan: takes a"),
        ("val_kwargs.min_p=-1", "val_kwargs.min_p=-1.0: must be from 0 to 1"),
        ("val_kwargs.repetition_penalty=-2", "val_kwargs.repetition_penalty=-2.0: must be"),
        ("val_kwargs.presence_penalty=-inf", "val_kwargs.presence_penalty=-inf: takes a finite"),
        ("stop=[a,'']", r"rollout.stop=\['a', ''\]: takes strings that are not empty"),
        ("stop=a", "rollout.stop='a': takes a list of texts"),
        ("stop_token_ids=[-1]", r"rollout.stop_token_ids=\[-1\]: takes tokens"),
        ("stop_token_ids=[x]", "rollout.stop_token_ids=.*takes a list of whole numbers"),
    ],
)
def test_values_that_make_no_sense(override: str, message: str) -> None:
    with pytest.raises(CalderaError, match=message):
        load(f"{ROLLOUT}.{override}")


def test_no_token_ends_an_answer_with_ignore_eos() -> None:
    with pytest.raises(CalderaError, match=r"stop_token_ids=\[7\] with .*ignore_eos=True"):
        load(f"{ROLLOUT}.stop_token_ids=[7]", f"{ROLLOUT}.ignore_eos=True")


@pytest.mark.parametrize("group", ["", "val_kwargs."])
@pytest.mark.parametrize(
    ("sampler", "override", "takers"),
    [
        ("hf", "repetition_penalty=1.1", "native or vllm, not hf"),
        ("hf", "presence_penalty=0.1", "native, vllm or sglang, not hf"),
        ("hf", "frequency_penalty=-0.1", "native, vllm or sglang, not hf"),
        ("sglang", "repetition_penalty=1.1", "native or vllm, not sglang"),
    ],
)
def test_a_sampler_refuses_what_it_cannot_do(
    sampler: str, override: str, takers: str, group: str
) -> None:
    with pytest.raises(CalderaError, match=f"{ROLLOUT}.{group}{override}: takes .*={takers}"):
        load(f"{ROLLOUT}.name={sampler}", f"{ROLLOUT}.{group}{override}")


@pytest.mark.parametrize("override", ["min_p=0.1", "top_p=0.9", "top_k=5"])
def test_sglang_says_at_the_start_that_its_log_probs_are_before_filters(override: str) -> None:
    sampler = f"{ROLLOUT}.name=sglang"
    with pytest.raises(CalderaError, match=f"{ROLLOUT}.{override}: .*raw_logprobs"):
        load(sampler, f"{ROLLOUT}.{override}")
    load(sampler, f"{ROLLOUT}.{override}", f"{ROLLOUT}.logprobs_mode=raw_logprobs")
    load(sampler, f"{ROLLOUT}.{override}", f"{ROLLOUT}.calculate_log_probs=False")
    load(sampler, f"{ROLLOUT}.val_kwargs.{override}")  # greedy
    validation = [f"{ROLLOUT}.val_kwargs.{text}" for text in ("do_sample=True", "temperature=1")]
    with pytest.raises(CalderaError, match=f"val_kwargs.{override}: .*raw_logprobs"):
        load(sampler, *validation, f"{ROLLOUT}.val_kwargs.{override}")


@pytest.mark.parametrize("sampler", ["native", "vllm"])
def test_others_take_all(sampler: str) -> None:
    load(f"{ROLLOUT}.name={sampler}", *(f"{ROLLOUT}.{text}" for text in GIVEN))


GENERATION = ("data.path=a", "data.output_path=b.parquet", "model.path=m")


def test_generation_hands_them_to_its_samplers() -> None:
    given = GENERATE.load([*GENERATION, *(f"rollout.{text}" for text in GIVEN)], "generation", None)
    made = generation_sampler(given)
    assert {key: made[key] for key in KEYS} == KEYS


def test_generation_with_the_keys_of_training_hands_them_on() -> None:
    made = generation_server.GENERATE.load(
        [
            "data.train_files=a.parquet", "actor_rollout_ref.model.path=m",
            "+data.output_path=b.parquet", *(f"{ROLLOUT}.{text}" for text in GIVEN),
        ],
        "ppo_trainer", None,
    )  # fmt: skip
    sampled = generation_sampler(made)
    assert {key: sampled[key] for key in KEYS} == KEYS


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.name=hf", "rollout.presence_penalty=1"], "presence_penalty=1.0: takes .*not hf"),
        (["rollout.stop=['']"], "rollout.stop="),
        (["rollout.repetition_penalty=0"], "rollout.repetition_penalty=0.0: must be"),
        (["rollout.url=http://h:1", "rollout.top_k=-1", "rollout.min_p=0.1"], "rollout.min_p=0.1:"),
        (
            ["rollout.url=http://h:1", "rollout.top_k=-1", "rollout.stop_token_ids=[3]"],
            r"rollout.stop_token_ids=\[3\]: chat completions",
        ),
        (
            ["rollout.url=http://h:1", "rollout.top_k=-1", "rollout.repetition_penalty=1.5"],
            "rollout.repetition_penalty=1.5: chat completions",
        ),
    ],
)
def test_generation_refuses(overrides: list[str], message: str) -> None:
    with pytest.raises(CalderaError, match=message):
        GENERATE.load([*GENERATION, *overrides], "generation", None)
