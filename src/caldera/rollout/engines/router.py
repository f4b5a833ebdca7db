"""Which of several engines serves a request."""

from __future__ import annotations

from collections import OrderedDict

SESSIONS_REMEMBERED = 10_000


class StickyRouter:
    """The one with the fewest requests; those of one session go where its first one went, where
    what they begin with is cached."""

    def __init__(self, replicas: int, remembered: int = SESSIONS_REMEMBERED) -> None:
        """Of sessions, the `remembered` that were used last are."""
        self._in_flight = [0] * replicas
        self._remembered = remembered
        self._homes: OrderedDict[str, int] = OrderedDict()

    def choose(self, session: str | None = None) -> int:
        """A replica for one request, which counts until it is released."""
        home = None if session is None else self._homes.get(session)
        if home is None:
            home = min(range(len(self._in_flight)), key=self._in_flight.__getitem__)
        if session is not None:
            self._homes[session] = home
            self._homes.move_to_end(session)
            if len(self._homes) > self._remembered:
                self._homes.popitem(last=False)
        self._in_flight[home] += 1
        return home

    def release(self, replica: int) -> None:
        """One of its requests has ended."""
        assert self._in_flight[replica] > 0, "it was chosen before"
        self._in_flight[replica] -= 1

    @property
    def in_flight(self) -> list[int]:
        """How many requests each has."""
        return list(self._in_flight)
