"""The loop of an agent that knows nothing of training: it asks a server in OpenAI's protocol."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from typing import Any

from caldera.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from caldera.agent_loop.output import AGENT
from caldera.data.importing import load_object
from caldera.data.loader import truncate
from caldera.errors import ConfigError, RolloutError
from caldera.rollout import AsyncSampler
from caldera.serving import ChatModel, Recorder, SessionServer, Trajectory, Turn
from caldera.serving.recording import trajectories_of
from caldera.threads import in_thread

logger = logging.getLogger(__name__)


# ---- Sessions of agents that reach the policy over HTTP


@dataclass(frozen=True)
class Session:
    """Where an agent asks the policy, and by which name."""

    base_url: str
    name: str
    recorder: Recorder
    sampler: AsyncSampler

    def end(self) -> list[Turn]:
        """The sampled trajectory; later requests are refused. Raises the error that has ended the
        sampler, if something has: that is no failure of the agent's."""
        turns = self.recorder.turns(self.name) or []
        self.recorder.drop(self.name)
        self.sampler.check()
        return turns


class BatchServer:
    """The server of a batch, on the sampler of its other trajectories. It is started by the first
    session, and ends with the batch."""

    def __init__(self, sampler: AsyncSampler, model: ChatModel, tool_format: str) -> None:
        self._sampler = sampler
        self._model = model
        self._tool_format = tool_format
        self._server: SessionServer | None = None

    def begin(self, seed: int) -> Session:
        """A session the seeds of whose requests follow from this one and their number."""
        if self._server is None:
            self._server = SessionServer(
                self._sampler,
                self._model,
                tool_format=self._tool_format,
                recorder=Recorder(only_opened=True),
            )
            _warn_of_template(self._server.cannot_append)
        name = uuid.uuid4().hex
        self._server.recorder.open(name, seed)
        return Session(self._server.url, name, self._server.recorder, self._sampler)

    async def close(self) -> None:
        """End the server. What agents still ask for, nobody waits for any more."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close, 0.0)


@cache  # once a process
def _warn_of_template(why: str | None) -> None:
    if why is not None:
        logger.warning(
            "each request of an agent is a trajectory of its own, and only the longest one is "
            "trained on: %s",
            why,
        )


OK, ERROR, TIMEOUT = "ok", "error", "timeout"
OUTCOME, OTHERS, VERSIONS = "agent_outcome", "other_trajectories", "weight_versions"
OPTIONS = ("agent", "timeout", "failure_reward")
AGENT_KEY = "agent of the black-box agent loop"

Returned = tuple[float | None, dict[str, Any]]
"""The reward of an agent, and columns."""


class BlackBoxAgentLoop(AgentLoopBase):
    """Calls `agent(base_url, session_id, row)`, and makes a trajectory of what it asked for.

    Of several trajectories, as of an agent that begins a second chat, the longest one is taken.
    """

    def __init__(
        self,
        *args: Any,
        agent: str,
        timeout: float = 600.0,
        failure_reward: float | None = None,
        **kwargs: Any,
    ) -> None:
        """`agent` is `file.py:function` or `pkg://a.b:function`; `failure_reward` that of an agent
        that fails; None: it is scored as others that bring no reward."""
        super().__init__(*args, **kwargs)
        self._agent = _function(agent, AGENT_KEY)
        self._timeout = timeout
        self._failure_reward = failure_reward

    @classmethod
    def check_options(cls, options: Mapping[str, Any], where: str) -> None:
        for name, value in options.items():
            if name not in OPTIONS:
                raise ConfigError(f"{where}.{name}={value!r}: takes {', '.join(OPTIONS)}")
        timeout, reward = options.get("timeout", 1.0), options.get("failure_reward", 0.0)
        if not _is_number(timeout) or timeout <= 0:
            raise ConfigError(f"{where}.timeout={timeout!r}: takes seconds, more than 0")
        if reward is not None and not _is_number(reward):
            raise ConfigError(f"{where}.failure_reward={reward!r}: takes a number or null")
        _function(options.get("agent"), f"{where}.agent")

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        session = self.server_manager.begin_session()
        with self.server_manager.timeline.event(AGENT) as event:
            outcome, (reward, columns) = await self._call(session, row)
            turns = session.end()
            event.update(outcome=outcome, turns=len(turns))
        return await self._output(turns, reward, {**columns, OUTCOME: outcome}, row)

    async def _call(self, session: Session, row: dict[str, Any]) -> tuple[str, Returned]:
        """(How the agent ended, what it returned)."""
        names = frozenset(row)  # which the agent might change
        arguments = (session.base_url, session.name, row)
        is_async = inspect.iscoroutinefunction(self._agent)
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                # Each call has its own thread: agents wait for most of their time.
                called = self._agent if is_async else partial(in_thread, self._agent)
                returned = await called(*arguments)
                if inspect.isawaitable(returned):  # of a function that only looks like a plain one
                    returned = await returned
            return OK, _read(returned, names)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other agents go on
            outcome = TIMEOUT if limit.expired() else ERROR
            logger.warning(
                "an agent failed, at uid %s: %s: %s: %s",
                row.get("uid"),
                outcome,
                type(error).__name__,
                error,
            )
            return outcome, (self._failure_reward, {})

    async def _output(
        self,
        turns: Sequence[Turn],
        reward: float | None,
        columns: dict[str, Any],
        row: Mapping[str, Any],
    ) -> AgentLoopOutput:
        data, found = self.config.data, trajectories_of(turns)
        fitting = [each for each in found if len(each.prompt_ids) <= data.max_prompt_length]
        longest = max(fitting, key=lambda each: len(each.response_ids), default=None)
        others = len(found) - (longest is not None)
        if longest is None:
            prompt = await self.apply_chat_template(list(row["raw_prompt"]))
            longest = Trajectory(truncate(prompt, data.max_prompt_length, data.truncation))
        versions = longest.weight_versions[: data.max_response_length]
        return AgentLoopOutput(
            prompt_ids=longest.prompt_ids,
            response_ids=longest.response_ids,
            response_mask=longest.response_mask,
            response_logprobs=longest.log_probs,
            reward_score=reward,
            num_turns=max(1, 2 * longest.turns),
            metrics=AgentLoopMetrics(generate_sequences=sum(turn.seconds for turn in turns)),
            extra_fields=columns | {OTHERS: others, VERSIONS: versions},
        )


def black_box_metrics(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of a batch, of which `facts` are the columns; none without such agents."""
    ours = [each for each in facts if OUTCOME in each]
    if not ours:
        return {}
    outcomes = [each[OUTCOME] for each in ours]
    return {
        "black_box/failed": float(outcomes.count(ERROR)),
        "black_box/timed_out": float(outcomes.count(TIMEOUT)),
        "black_box/other_trajectories": float(sum(each[OTHERS] for each in ours)),
        "black_box/empty": float(sum(not each[VERSIONS] for each in ours)),
    }


def _function(given: Any, key: str) -> Callable[..., Any]:
    path, _, name = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    if not path:
        raise ConfigError(f"{key}={given!r}: takes file.py:function or pkg://a.b:function")
    function = load_object(path, name, key)
    if not callable(function):
        raise ConfigError(f"{key}={given!r}: is no function")
    try:
        inspect.signature(function).bind("base_url", "session_id", {})
    except TypeError as error:
        raise ConfigError(
            f"{key}={given!r}: must take (base_url, session_id, row): {error}"
        ) from error
    return function  # type: ignore[no-any-return]


def _read(returned: Any, names: frozenset[str]) -> Returned:
    """The output of an agent; `names` are those of the row's own columns."""
    columns = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    score = columns.pop("score", None)
    if score is not None and not _is_number(score):
        raise RolloutError(
            f"an agent returned {returned!r:.200}: takes None, a finite number, or a dict whose "
            "'score' is one"
        )
    if taken := sorted(names & columns.keys()):
        raise RolloutError(
            f"an agent returned {', '.join(taken)}: the row has columns of that name"
        )
    return (None if score is None else float(score)), columns


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
