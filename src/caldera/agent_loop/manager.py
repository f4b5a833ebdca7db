"""Runs the trajectories of a batch, all at the same time, on the sampler of this process."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import caldera.agent_loop.react_agent
import caldera.agent_loop.sampling
import caldera.agent_loop.tool_agent  # noqa: F401 -- all register themselves
from caldera.agent_loop.base import (
    AGENT_LOOPS,
    AgentLoopBase,
    AgentLoopOutput,
    DataSettings,
    Equipment,
    MakeLoop,
    RunConfig,
)
from caldera.agent_loop.black_box import BatchServer
from caldera.agent_loop.output import (
    GENERATE,
    TOOL,
    Timeline,
    TrajectoryFacts,
    batch_of,
    facts_of,
    fitted,
)
from caldera.agent_loop.sampling import TrajectorySampler
from caldera.data.importing import load_class
from caldera.errors import ConfigError, RolloutError
from caldera.protocol import DataProto
from caldera.rollout import AsyncSampler, Completion, Rollout, SamplingParams
from caldera.rollout.base import OnFinished
from caldera.serving import ChatModel
from caldera.storage.paths import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config import PPOTrainerConfig
    from caldera.tools.running import ToolRunner


KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
GIVEN = (
    "trainer_config",
    "server_manager",
    "tokenizer",
    "processor",
    "dataset_cls",
    "dataset_config",
)
"""The arguments that every loop is made with."""


def read_loops(path: str | None) -> dict[str, MakeLoop]:
    """The loops of a file, a list of `{name, _target_, ...}`: the rest goes to the constructor."""
    if path is None:
        return {}
    entries = read_yaml(path, KEY)
    if not isinstance(entries, list):
        raise ConfigError(f"{KEY}={path}: must hold a list of mappings with name and _target_")
    loops: dict[str, MakeLoop] = {}
    for number, entry in enumerate(entries):
        name, make = _read(entry, f"{KEY}={path}: [{number}]")
        if name in loops:
            raise ConfigError(f"{KEY}={path}: the name {name!r} is there twice")
        loops[name] = make
    return loops


def find_loop(name: str, own: Mapping[str, MakeLoop]) -> MakeLoop:
    """The loop of that name: one of the file's, else a registered one."""
    return own[name] if name in own else AGENT_LOOPS[name]


def loop_class(make: MakeLoop) -> type[AgentLoopBase]:
    """The class of which loops are made."""
    kind: Any = make.func if isinstance(make, partial) else make
    assert isinstance(kind, type) and issubclass(kind, AgentLoopBase)
    return kind


def _read(entry: Any, where: str) -> tuple[str, MakeLoop]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}={entry!r}: takes a mapping with name and _target_")
    for key in ("name", "_target_"):
        if not isinstance(entry.get(key), str):
            raise ConfigError(f"{where}.{key} is missing, or is no text")
    extras = {str(key): value for key, value in entry.items() if key not in ("name", "_target_")}
    key = f"{where}._target_"
    kind = load_class(entry["_target_"], AgentLoopBase, key)  # type: ignore[type-abstract]
    kind.check_options(extras, where)
    _check_constructor(kind, extras, where)
    return entry["name"], partial(kind, **extras)


def _check_constructor(kind: type[AgentLoopBase], extras: dict[str, Any], where: str) -> None:
    """A loop can be made of its entry, and reads what stands there."""
    if inspect.isabstract(kind):
        raise ConfigError(f"{where}._target_: {kind.__name__} has no run")
    if extras and kind.__init__ is AgentLoopBase.__init__:
        raise ConfigError(f"{where}: {kind.__name__} takes no {', '.join(extras)}")
    try:
        inspect.signature(kind).bind(**dict.fromkeys(GIVEN), **extras)
    except TypeError as error:
        raise ConfigError(f"{where}: {kind.__name__} cannot be made of this: {error}") from error


Result = TypeVar("Result")
Row = Mapping[str, Any]
Ended = tuple[AgentLoopOutput, TrajectoryFacts]


class AgentLoops:
    """The loops of a process. They are built where they are used."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        equip: Callable[[PPOTrainerConfig, PreTrainedTokenizerBase], Equipment],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        agent = config.actor_rollout_ref.rollout.agent
        # First: a module of loops may register a parser of tool calls.
        self._own: dict[str, MakeLoop] = read_loops(agent.agent_loop_config_path)
        self._setting = RunConfig(config, equip(config, tokenizer))
        if (tools := self._setting.equipment.tools) is not None:
            # Nobody ends the loops of a process: what tools hold open goes when they do.
            weakref.finalize(self, _close, tools).atexit = False

    def __call__(
        self,
        rows: Sequence[Row],
        seeds: Sequence[int],
        rollout: Rollout,
        params: SamplingParams,
        pad_token_id: int,
        on_finished: OnFinished | None,
    ) -> DataProto:
        """One trajectory a row, as a batch; `on_finished` gets each as soon as it ends."""
        config = self._config.actor_rollout_ref.rollout
        if rollout.decode is None:
            rollout.decode = self._decode
        ended = run_in_background(self._run_all(rows, seeds, rollout, params, on_finished))
        return batch_of(
            [output for output, _ in ended],
            [facts for _, facts in ended],
            config.prompt_length,
            config.response_length,
            pad_token_id,
            config.calculate_log_probs,
        )

    async def _run_all(
        self,
        rows: Sequence[Row],
        seeds: Sequence[int],
        rollout: Rollout,
        params: SamplingParams,
        on_finished: OnFinished | None,
    ) -> list[Ended]:
        zero = time.perf_counter()
        is_traced = self._config.actor_rollout_ref.rollout.trace.backend is not None
        most = self._config.actor_rollout_ref.rollout.agent.max_concurrent or len(rows)
        places = asyncio.Semaphore(most)

        async def one(place: int) -> Ended:
            async with places:
                timeline = Timeline(zero, is_detailed=is_traced)
                turns = TrajectorySampler(
                    sampler, params, seeds[place], self._max_model_len, timeline, server
                )
                output, facts = await self._run_one(rows[place], turns, params)
            if on_finished is not None and output.reward_score is None:
                on_finished(place, _as_completion(output, facts))
            return output, facts

        async with AsyncSampler(rollout) as sampler:
            tool_format = self._config.actor_rollout_ref.rollout.multi_turn.format
            server = BatchServer(sampler, self._chat_model(params), tool_format)
            tasks = [asyncio.create_task(one(place)) for place in range(len(rows))]
            try:
                return list(await asyncio.gather(*tasks))
            finally:  # one that fails ends the others
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.close()

    async def _run_one(self, row: Row, turns: TrajectorySampler, params: SamplingParams) -> Ended:
        rollout = self._config.actor_rollout_ref.rollout
        name = row.get("agent_name") or rollout.agent.default_agent_loop
        loop = find_loop(str(name), self._own)(
            trainer_config=self._setting,
            server_manager=turns,
            tokenizer=self._tokenizer,
            processor=None,
            dataset_cls=None,
            dataset_config=DataSettings(self._config.data),
        )
        asked = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "repetition_penalty": params.repetition_penalty,
            "logprobs": rollout.calculate_log_probs,
        }
        if row.get("raw_prompt") is None:
            raise ConfigError(
                "data.return_raw_chat=False: agent loops need the messages of the prompts"
            )
        try:
            output = await loop.run(asked, **row)
            if not isinstance(output, AgentLoopOutput):
                raise RolloutError(
                    f"{type(loop).__name__}.run must return an AgentLoopOutput, got a "
                    f"{type(output).__name__}"
                )
        except Exception as error:
            error.add_note(f"in the agent loop {name!r}, at uid {row.get('uid')}")
            raise
        metrics, events = output.metrics, turns.timeline
        metrics.generate_sequences = metrics.generate_sequences or events.seconds(GENERATE)
        metrics.tool_calls = metrics.tool_calls or events.seconds(TOOL)
        output = fitted(output, rollout.prompt_length, rollout.response_length)
        return output, facts_of(output, events.events)

    @property
    def _max_model_len(self) -> int:
        return self._config.actor_rollout_ref.rollout.longest_sequence

    def _chat_model(self, params: SamplingParams) -> ChatModel:
        """The policy as agents know it that reach it over HTTP."""
        return ChatModel(
            name="policy",
            tokenizer=self._tokenizer,
            vocabulary=len(self._tokenizer),
            stop_tokens=params.stop_token_ids,
            prompt_length=self._max_model_len - 1,
            response_length=params.max_tokens,
            max_length=self._max_model_len,
            answers_to_any_name=True,
            sampling=params,
            template_kwargs=self._config.data.apply_chat_template_kwargs,
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


def _as_completion(output: AgentLoopOutput, facts: TrajectoryFacts) -> Completion:
    """The trajectory as a completion of one turn."""
    log_probs = output.response_logprobs or [0.0] * len(output.response_ids)
    return Completion(output.response_ids, log_probs, "stop", 0, columns=facts.columns())


def _close(tools: ToolRunner) -> None:
    """Not waited for: this may be called in the event loop's own thread."""
    asyncio.run_coroutine_threadsafe(tools.close(), _background())


@cache
def _background() -> asyncio.AbstractEventLoop:
    """The event loop of this process, in its own thread. Connections of tools, such as
    connections, belongs to it, and outlives the batch."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agent loops", daemon=True).start()
    return loop


def run_in_background(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Wait for a coroutine that runs in the event loop of this process."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _background())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
