"""Agent loops of a run: which there are, what they share, and whether all of it fits together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sized
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

import caldera.search_agent.loop
import caldera.tools.formats  # noqa: F401 -- both register what they hold
from caldera.agent_loop.base import AgentLoopBase, Equipment
from caldera.agent_loop.black_box import BlackBoxAgentLoop
from caldera.agent_loop.loading import find_loop, loop_class, read_loops
from caldera.agent_loop.manager import AgentLoops, run_in_background
from caldera.config import DataConfig, PPOTrainerConfig
from caldera.config.rollout import MultiTurnConfig
from caldera.data import RLHFDataset
from caldera.data.turns import Appending, TurnAppender
from caldera.errors import ConfigError
from caldera.interactions.loading import load_interactions
from caldera.reward.sandbox.for_tools import SandboxPrograms
from caldera.tools.loading import load_tools
from caldera.tools.parsing import TOOL_PARSERS
from caldera.tools.running import Side, ToolRunner
from caldera.workers.agents import MakeAgents

__all__ = ["agents_may_score", "data_with_tools", "equip", "make_agents"]

logger = logging.getLogger(__name__)

ROLLOUT = "actor_rollout_ref.rollout"
SINGLE_TURN = "single_turn_agent"


def equip(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> Equipment:
    """What the loops of this process share."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    tools = _runner(multi_turn)  # first: a module of tools may register a parser
    return Equipment(
        turns=TurnAppender(tokenizer, config.data.apply_chat_template_kwargs),
        parser=TOOL_PARSERS[multi_turn.format](tokenizer),
        tools=tools,
        interactions=load_interactions(multi_turn.interaction_config_path),
    )


def data_with_tools(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> DataConfig:
    """The configuration of the data: the lengths of prompts are those with the tools in them."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    runner = _runner(multi_turn)
    if runner is None:
        return config.data
    schemas = runner.schemas()
    run_in_background(runner.close())
    is_checked = multi_turn.tokenization_sanity_check_mode != "disable"
    turns = TurnAppender(tokenizer, config.data.apply_chat_template_kwargs)
    if is_checked and schemas and not turns.shows(schemas):
        # Not an error: the prompts of the data may describe the tools themselves.
        logger.warning(
            "the chat template of %r leaves out the tools (%s): a prompt is the same with and "
            "without them, so the model never sees what it can call. Set %s to a template that "
            "renders `tools`, start from a model whose template does, or describe the tools in "
            "the prompts of the data",
            tokenizer.name_or_path,
            ", ".join(runner.tools),
            "actor_rollout_ref.model.custom_chat_template",
        )
    kwargs = {**config.data.apply_chat_template_kwargs, "tools": schemas}
    return replace(config.data, apply_chat_template_kwargs=kwargs)


def make_agents(
    config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, datasets: Iterable[Any]
) -> MakeAgents | None:
    """What makes the agent loops in a worker's process, or None if no row asks for one."""
    rollout = config.actor_rollout_ref.rollout
    by_name = _loops(config, datasets)
    names, loops = set(by_name), list(by_name.values())
    wanted = rollout.multi_turn.enable or names != {SINGLE_TURN}
    _check_use(rollout.multi_turn, loops, names, wanted)
    for loop in loops:
        loop.check_run(config)
    if not wanted:
        return None
    if not config.data.return_raw_chat:
        raise ConfigError("data.return_raw_chat=False: agent loops need the prompts' messages")
    _check_template(config, tokenizer)
    return partial(AgentLoops, config, tokenizer, equip)


def agents_may_score(config: PPOTrainerConfig, datasets: Iterable[Any]) -> bool:
    """Whether a loop of this run may give trajectories their reward, which no scorer does then."""
    return any(
        issubclass(loop, BlackBoxAgentLoop) or not loop.__module__.startswith("caldera.")
        for loop in _loops(config, datasets).values()
    )


def _loops(config: PPOTrainerConfig, datasets: Iterable[Any]) -> dict[str, type[AgentLoopBase]]:
    """The loops that rows ask for, by name."""
    agent = config.actor_rollout_ref.rollout.agent
    own = read_loops(agent.agent_loop_config_path)
    names = {agent.default_agent_loop}
    for dataset in datasets:
        names |= _agent_names(dataset)
    return {name: loop_class(find_loop(name, own)) for name in sorted(names)}


def _runner(multi_turn: MultiTurnConfig) -> ToolRunner | None:
    if not _has_tools(multi_turn):
        return None
    tools = load_tools(
        multi_turn.tool_config_path, multi_turn.function_tool_path, SandboxPrograms()
    )
    return ToolRunner(
        tools, multi_turn.max_parallel_calls, multi_turn.max_tool_response_length,
        cast(Side, multi_turn.tool_response_truncate_side),
    )  # fmt: skip


def _has_tools(multi_turn: MultiTurnConfig) -> bool:
    return bool(multi_turn.tool_config_path or multi_turn.function_tool_path)


def _agent_names(dataset: Any) -> set[str]:
    """The loops that rows ask for. A data set of the user's own may choose them itself, and only
    its first row is looked at."""
    values = getattr(dataset, "column_values", None)
    names = [] if values is None else list(values("agent_name"))
    is_own = isinstance(dataset, Dataset) and type(dataset) is not RLHFDataset
    if is_own and len(cast(Sized, dataset)):
        names.append(dataset[0].get("agent_name"))
    return {str(name) for name in names if name}


def _check_use(
    multi_turn: MultiTurnConfig, loops: list[type[AgentLoopBase]], names: set[str], wanted: bool
) -> None:
    """Whatever is configured has a loop that makes use of it."""
    can_call = any(loop.calls_tools for loop in loops)
    can_talk = any(loop.takes_interactions for loop in loops)
    for key, value, is_used in (
        ("tool_config_path", multi_turn.tool_config_path, can_call),
        ("function_tool_path", multi_turn.function_tool_path, can_call),
        ("interaction_config_path", multi_turn.interaction_config_path, can_talk),
    ):
        if value and not is_used:
            raise ConfigError(
                f"{ROLLOUT}.multi_turn.{key}={value}: no agent loop of this run makes use of it. "
                f"The rows ask for {', '.join(sorted(names))}; set "
                f"{ROLLOUT}.agent.default_agent_loop=tool_agent, or agent_name in the rows"
            )
    if multi_turn.turn_rewards != "trajectory" and not wanted:
        raise ConfigError(
            f"{ROLLOUT}.multi_turn.turn_rewards={multi_turn.turn_rewards}: without agent loops "
            "there are no turns; takes trajectory"
        )


def _check_template(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """The chat template can have turns appended, of the roles that this run appends."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.tokenization_sanity_check_mode == "disable":
        return
    roles = ["tool"] if _has_tools(multi_turn) else []
    roles += ["user"] if multi_turn.interaction_config_path else []
    turns = TurnAppender(tokenizer, config.data.apply_chat_template_kwargs)
    if roles and turns.check(roles) is Appending.AS_SAMPLED:
        logger.info(
            "the chat template would change earlier turns, such as leave out what was thought; "
            "here they stay as they were sampled"
        )
