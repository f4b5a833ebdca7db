"""An interaction that follows a script."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from caldera.errors import ConfigError
from caldera.interactions.base import BaseInteraction, Message, Reply, last_answer

TURN_KEYS = ("say", "expect", "score", "otherwise")


@dataclass(frozen=True)
class Turn:
    """One turn of a script."""

    say: str = ""
    """The reply; the conversation is over after the last turn."""
    expect: str | None = None
    """A regular expression, to be found in what the policy said."""
    score: float = 0.0
    """Of the policy's turn, if what is expected was found, or nothing is expected."""
    otherwise: float = 0.0
    """Of the policy's turn, if it was not."""


class ScriptedInteraction(BaseInteraction):
    """Goes through the `turns` of its config, or those of the row's `interaction_kwargs`.

    Each is a mapping with `say`, `expect`, `score` and `otherwise`. The n-th response of the policy
    is compared with the n-th of them, which is then said.
    """

    options = ("turns",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        given = config.get("turns")
        self._script = None if given is None else read_script(given, f"{self.name}: config.turns")
        self._scripts: dict[str, list[Turn]] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        given = kwargs.get("turns")
        where = f"{self.name}: interaction_kwargs.turns"
        script = self._script if given is None else read_script(given, where)
        if script is None:
            raise ConfigError(f"the interaction {self.name!r} has no turns, in config or row")
        instance_id = await super().start_interaction(instance_id)
        self._scripts[instance_id] = list(script)
        self._scores[instance_id] = 0.0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[Message], **kwargs: Any
    ) -> Reply:
        script = self._scripts[instance_id]
        turn = script.pop(0)
        said = last_answer(messages)
        is_met = turn.expect is None or re.search(turn.expect, said) is not None
        score = turn.score if is_met else turn.otherwise
        self._scores[instance_id] += score
        return not script, turn.say, score, {"met": is_met}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._scripts.pop(instance_id, None)
        self._scores.pop(instance_id, None)


def read_script(given: Any, where: str) -> list[Turn]:
    """The turns that plain data describe."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(f"{where}={given!r}: takes a list of at least one turn")
    turns = []
    for number, turn in enumerate(given):
        if not isinstance(turn, Mapping) or not set(turn) <= set(TURN_KEYS):
            raise ConfigError(
                f"{where}[{number}]={turn!r}: takes a mapping of {', '.join(TURN_KEYS)}"
            )
        # A column of a parquet file holds None wherever one row lacks what another has.
        said = {key: value for key, value in turn.items() if value is not None}
        _check_turn(said, f"{where}[{number}]")
        turns.append(Turn(**said))
    return turns


def _check_turn(turn: Mapping[str, Any], where: str) -> None:
    for key, value in turn.items():
        is_text = key in ("say", "expect")
        if is_text and not isinstance(value, str):
            raise ConfigError(f"{where}.{key}={value!r}: takes a text, in quotes")
        if not is_text and not (isinstance(value, Real) and math.isfinite(value)):
            raise ConfigError(f"{where}.{key}={value!r}: takes a finite number")
    try:
        re.compile(turn.get("expect", ""))
    except re.error as error:
        raise ConfigError(
            f"{where}.expect={turn['expect']!r}: not a regular expression: {error}"
        ) from error
