"""Sessions of agents that reach the policy over HTTP."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from functools import cache

from caldera.rollout import AsyncSampler
from caldera.serving import ChatModel, Recorder, SessionServer, Turn

__all__ = ["BatchServer", "Session"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """Where an agent asks the policy, and by which name."""

    base_url: str
    name: str
    recorder: Recorder
    sampler: AsyncSampler

    def end(self) -> list[Turn]:
        """What was sampled; requests that come later are refused. Raises what has ended the
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
                self._sampler, self._model, tool_format=self._tool_format,
                recorder=Recorder(only_opened=True),
            )  # fmt: skip
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
            "trained on: %s", why,
        )  # fmt: skip
