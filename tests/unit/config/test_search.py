"""Search-R1's keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from caldera.config import PPOTrainerConfig
from caldera.errors import ConfigError

Load = Callable[..., PPOTrainerConfig]

SEARCH = (
    "do_search=true",
    "max_turns=2",
    "retriever.url=http://127.0.0.1:8000/retrieve",
    "actor_rollout_ref.actor.state_masking=true",
    "data.max_response_length=10",
    "data.max_obs_length=7",
)


def test_a_response_has_room_for_all_turns(load: Load) -> None:
    config = load(*SEARCH, "data.max_start_length=20", "data.max_prompt_length=100")
    rollout = config.actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == "search_agent"
    assert rollout.response_length == 3 * 10 + 2 * 7
    assert (rollout.prompt_length, config.data.max_prompt_length) == (20, 20)


@pytest.mark.parametrize("key", ["data.max_start_length=20", SEARCH[3]])
def test_a_retriever_with_search_r1s_keys_asks_for_searches(load: Load, key: str) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    masked = SEARCH[3]
    config = load(SEARCH[2], masked, key)
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "search_agent"
    with pytest.raises(ConfigError, match="needs do_search=True"):
        load("do_search=false", SEARCH[2], key)
    assert load(SEARCH[2], f"{loop}=single_turn_agent").do_search is False


def test_a_response_length_that_was_given_stays(load: Load) -> None:
    config = load(*SEARCH, "actor_rollout_ref.rollout.response_length=30")
    assert config.actor_rollout_ref.rollout.response_length == 30
    assert config.data.max_response_length == 10


def test_null_asks_for_all_samples(load: Load) -> None:
    assert load("data.train_data_num=null").data.train_max_samples == -1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["do_search=true"], "do_search=True needs retriever.url"),
        ([*SEARCH, "actor_rollout_ref.actor.state_masking=false"], "state_masking=False"),
        (
            [*SEARCH, "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"],
            "default_agent_loop='tool_agent': do_search=True takes search_agent",
        ),
        (["data.max_start_length=5"], "data.max_start_length=5 needs do_search=True"),
        (["actor_rollout_ref.actor.state_masking=true"], "state_masking=True needs do_search"),
    ],
)
def test_what_does_not_fit_together(load: Load, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load(*overrides)
