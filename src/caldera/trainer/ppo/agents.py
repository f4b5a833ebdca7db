"""Agent loops of a run: which there are, what they share, and whether all of it fits together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

import caldera.search_agent.loop
import caldera.tools.formats  # noqa: F401 -- both register what they hold
from caldera.agent_loop.base import AgentLoopBase, Equipment
from caldera.agent_loop.black_box import BlackBoxAgentLoop, black_box_metrics
from caldera.agent_loop.manager import (
    AgentLoops,
    find_loop,
    loop_class,
    read_loops,
    run_in_background,
)
from caldera.agent_loop.output import COLUMN, TrajectoryFacts
from caldera.config import DataConfig, PPOTrainerConfig
from caldera.config.rollout import MultiTurnConfig
from caldera.data import RLHFDataset, object_array
from caldera.data.chat import Appending, TurnAppender, require_chat_template
from caldera.errors import ConfigError
from caldera.interactions.base import load_interactions
from caldera.protocol import DataProto, tensors_of
from caldera.search_agent.loop import search_metrics
from caldera.tools.formats import TOOL_PARSERS
from caldera.tools.loading import load_tools
from caldera.tools.running import Side, ToolRunner
from caldera.trainer.metrics import Metrics
from caldera.workers.sampler import MakeAgents

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
    if config.data.apply_chat_template is False:
        raise ConfigError("data.apply_chat_template=False: agent loops render conversations")
    require_chat_template(tokenizer, config.data.apply_chat_template_kwargs)
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
    tools = load_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
    return ToolRunner(
        tools,
        multi_turn.max_parallel_calls,
        multi_turn.max_tool_response_length,
        cast(Side, multi_turn.tool_response_truncate_side),
    )


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


# ---- What the controller does with the trajectories of agent loops

SECONDS = ("generate_sequences", "tool_calls", "compute_score")
DUMPED = ("__num_turns__", "turn_scores", "tool_rewards", "tool_calls", "timeline")
"""Columns of agents that are written beside the responses."""


def facts_in(batch: DataProto) -> list[TrajectoryFacts]:
    """What is known of each row's trajectory; empty without agent loops."""
    column = batch.non_tensor_batch.get(COLUMN)
    return [] if column is None else list(column)


def with_agent_columns(responses: DataProto) -> DataProto:
    """The responses, with a column of each thing that agent loops tell of their trajectories.

    Loops differ in what they tell: a row has None where its loop tells nothing.
    """
    facts = facts_in(responses)
    if not facts:
        return responses
    told = [
        {**fact.columns(), "tool_calls": fact.tool_calls, "timeline": fact.timeline}
        for fact in facts
    ]
    names = dict.fromkeys(name for row in told for name in row)
    for name in names:
        responses.non_tensor_batch[name] = object_array([row.get(name) for row in told])
    turns = responses.non_tensor_batch["__num_turns__"]
    responses.non_tensor_batch["__num_turns__"] = turns.astype(np.int32)
    return responses


def agent_metrics(batch: DataProto) -> Metrics:
    """Tool calls by name and outcome, seconds by kind, and the slowest trajectory."""
    facts = facts_in(batch)
    if not facts:
        return {}
    calls = [sum(fact.tool_calls.values()) for fact in facts]
    metrics = spread_of("tool_call_counts", calls)
    total: Counter[str] = Counter()
    for fact in facts:
        total.update(fact.tool_calls)
    metrics |= {f"tool_calls/{name}": float(count) for name, count in sorted(total.items())}
    for name in SECONDS:
        seconds = [fact.metrics[name] for fact in facts]
        if name != "compute_score" or any(seconds):
            metrics |= spread_of(f"timing_s/agent_loop/{name}", seconds)
    preempted = [fact.metrics["num_preempted"] for fact in facts]
    if min(preempted) >= 0:
        metrics |= spread_of("timing_s/agent_loop/num_preempted", preempted)
    tensors = tensors_of(batch)
    metrics |= search_metrics(
        [fact.extra_fields for fact in facts], tensors["response_mask"], tensors["attention_mask"]
    )
    metrics |= black_box_metrics([fact.extra_fields for fact in facts])
    return metrics | _slowest(batch, facts)


def _slowest(batch: DataProto, facts: Sequence[TrajectoryFacts]) -> Metrics:
    """Of the trajectory that took longest."""
    took = [fact.metrics["generate_sequences"] + fact.metrics["tool_calls"] for fact in facts]
    row = int(np.argmax(took))
    tensors = tensors_of(batch)
    mask, width = tensors["attention_mask"][row], tensors["prompts"].shape[-1]  # (P + R,)
    prefix = "timing_s/agent_loop/slowest"
    return {
        f"{prefix}/generate_sequences": facts[row].metrics["generate_sequences"],
        f"{prefix}/tool_calls": facts[row].metrics["tool_calls"],
        f"{prefix}/prompt_length": float(mask[:width].sum()),
        f"{prefix}/response_length": float(mask[width:].sum()),
    }


def spread_of(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"{name}/min": float(min(values)),
        f"{name}/max": float(max(values)),
        f"{name}/mean": float(np.mean(values)),
    }
