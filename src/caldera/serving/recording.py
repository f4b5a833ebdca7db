"""The tokens that a server's sessions sampled, and the trajectories that it makes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from caldera.errors import DataError
from caldera.rollout import Completion
from caldera.serving.conversations import Sampled

logger = logging.getLogger(__name__)

NOT_SAMPLED = -1


@dataclass(frozen=True)
class Turn:
    """A response to a request."""

    request: int
    """The request's number in its session; one that asked for n responses has n turns."""
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    """Of each token of the response."""
    weight_versions: list[int]
    """That sampled each token of the response."""
    finish_reason: str
    seconds: float

    @staticmethod
    def of(request: int, prompt: Sequence[int], sampled: Completion, seconds: float) -> Turn:
        return Turn(
            request,
            list(prompt),
            list(sampled.token_ids),
            list(sampled.log_probs),
            sampled.token_versions(),
            sampled.finish_reason,
            seconds,
        )


@dataclass
class Trajectory:
    """Turns each of which goes on where the one before ended.

    `response_ids` is all behind the first prompt: what was sampled, and what was put in between.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    """1 for tokens that were sampled, 0 for the rest."""
    log_probs: list[float] = field(default_factory=list)
    """0.0 for tokens that were not sampled."""
    weight_versions: list[int] = field(default_factory=list)
    """-1 for tokens that were not sampled."""
    turns: int = 0
    finish_reason: str = ""
    """Of the last turn."""

    def goes_on(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with all tokens so far."""
        first, length = len(self.prompt_ids), len(self.prompt_ids) + len(self.response_ids)
        begins = prompt[:first] == self.prompt_ids
        return begins and prompt[first:length] == self.response_ids

    def append(self, turn: Turn) -> None:
        """Take in a turn whose prompt goes on with this."""
        between = turn.prompt_ids[len(self.prompt_ids) + len(self.response_ids) :]
        new = len(turn.response_ids)
        self.response_ids += between + turn.response_ids
        self.response_mask += [0] * len(between) + [1] * new
        self.log_probs += [0.0] * len(between) + turn.log_probs
        self.weight_versions += [NOT_SAMPLED] * len(between) + turn.weight_versions
        self.turns += 1
        self.finish_reason = turn.finish_reason


def trajectories_of(turns: Sequence[Turn]) -> list[Trajectory]:
    """Turns, in their order, as trajectories: one whose prompt begins with all tokens of a
    trajectory so far goes on with it (with the longest such), any other begins a new one."""
    found: list[Trajectory] = []
    for turn in turns:
        fitting = [each for each in found if each.goes_on(turn.prompt_ids)]
        longest = max(fitting, key=lambda each: len(each.response_ids), default=None)
        if longest is None:
            longest = Trajectory(list(turn.prompt_ids))
            found.append(longest)
        longest.append(turn)
    return found


@dataclass
class _Session:
    turns: list[Turn] = field(default_factory=list)
    sampled: Sampled = field(default_factory=Sampled)
    requests: int = 0
    seed: int | None = None


class Recorder:
    """The sessions of a server, for any thread to read."""

    def __init__(self, most_sessions: int | None = None, only_opened: bool = False) -> None:
        """With more than `most_sessions`, the least recently used are forgotten.
        `only_opened`: requests of sessions that nobody has opened are refused."""
        self._most = most_sessions
        self._only_opened = only_opened
        self._sessions: dict[str, _Session] = {}  # the last one was used last
        self._lock = threading.Lock()
        self.forgotten = 0

    def open(self, session: str, seed: int) -> None:
        """Begin a session the seeds of whose requests follow from this one."""
        with self._lock:
            self._sessions[session] = _Session(seed=seed)

    def check(self, session: str | None) -> None:
        """Raise if a request of that session is not to be answered."""
        with self._lock:
            if self._only_opened and session not in self._sessions:
                raise DataError(
                    f"session_id={session!r}: this server answers requests of sessions that are "
                    "open, and that name theirs by session_id or x-session-id"
                )

    def seed(self, session: str) -> int | None:
        """The seed with which a session was opened, if it was."""
        with self._lock:
            entry = self._sessions.get(session)
            return None if entry is None else entry.seed

    def begin(self, session: str) -> tuple[int, Sampled]:
        """A request comes in: (its number in its session, what was sampled there before)."""
        with self._lock:
            entry = self._sessions.pop(session, None) or _Session()
            self._sessions[session] = entry
            entry.requests += 1
            if self._most is not None and len(self._sessions) > self._most:
                del self._sessions[next(iter(self._sessions))]
                self.forgotten += 1
                if self.forgotten == 1:
                    logger.warning(
                        "sessions are forgotten from now on: more than server.max_sessions=%d",
                        self._most,
                    )
            return entry.requests, entry.sampled

    def add(self, session: str, turn: Turn) -> None:
        """A response; one of a session that was dropped meanwhile is dropped, too."""
        with self._lock:
            if session in self._sessions:
                self._sessions[session].turns.append(turn)

    def sessions(self) -> list[str]:
        with self._lock:
            return list(self._sessions)

    def turns(self, session: str) -> list[Turn] | None:
        """The responses of a session in the order in which they ended; None: there is none such."""
        with self._lock:
            entry = self._sessions.get(session)
            return None if entry is None else list(entry.turns)

    def trajectories(self, session: str) -> list[Trajectory]:
        """The trajectories of a session; none of one that is not known."""
        return trajectories_of(self.turns(session) or [])

    def drop(self, session: str) -> bool:
        """Forget a session; False if it is not known."""
        with self._lock:
            return self._sessions.pop(session, None) is not None
