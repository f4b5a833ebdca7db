"""Search-R1's keys: what `do_search` asks for, and what follows from it."""

from __future__ import annotations

from caldera.config.fields import shown
from caldera.config.ppo import PPOTrainerConfig
from caldera.errors import ConfigError

__all__ = ["check_search"]

LOOP = "search_agent"
DEFAULT_LOOP = "single_turn_agent"


def check_search(config: PPOTrainerConfig) -> None:
    """With `do_search` the rows go to the search agent, and a response has room for all turns."""
    if not config.do_search:
        _check_unused(config)
        return
    _check_needs(config)
    data, rollout = config.data, config.actor_rollout_ref.rollout
    rollout.agent.default_agent_loop = LOOP
    if data.max_start_length is not None:
        if rollout.prompt_length == data.max_prompt_length:
            rollout.prompt_length = data.max_start_length
        data.max_prompt_length = data.max_start_length
    if rollout.response_length == data.max_response_length:
        turns, answers = config.max_turns, config.max_turns + 1
        rollout.response_length = answers * data.max_response_length + turns * data.max_obs_length


def _check_needs(config: PPOTrainerConfig) -> None:
    if not config.retriever.url:
        raise ConfigError(
            "do_search=True needs retriever.url: the address of a retrieval service, such as "
            "http://127.0.0.1:8000/retrieve"
        )
    if not config.actor_rollout_ref.actor.state_masking:
        raise ConfigError(
            "actor_rollout_ref.actor.state_masking=False: do_search=True takes true, since only "
            "tokens that the policy sampled are trained on"
        )
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if loop not in (LOOP, DEFAULT_LOOP):
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={loop!r}: do_search=True takes "
            f"{LOOP}"
        )


def _check_unused(config: PPOTrainerConfig) -> None:
    """Keys that nothing would read."""
    for key, value in {
        "data.max_start_length": config.data.max_start_length,
        "actor_rollout_ref.actor.state_masking": config.actor_rollout_ref.actor.state_masking,
    }.items():
        if value:
            raise ConfigError(f"{key}={shown(value)} needs do_search=True")
