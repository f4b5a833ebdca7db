"""Reward functions as Python callables: arguments by name, whole batches, or verl's signature."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caldera.errors import ConfigError, RewardError

Reward = Callable[..., Any]
"""A reward function. Its parameters say what it gets:

- by name: `response`, `prompt` (as in the data set), `row` (all columns), and any column; a first
  parameter of another name gets the response. Returns a number, or a dict with `score`.
- a batch: `completions`, with `prompts` and any column as lists; returns a list of numbers. None
  stands for a reward that does not apply. Responses to chat prompts are lists of one message.
- verl's: `data_source, solution_str, ground_truth, extra_info`.

Each may be async."""

COMPLETIONS = "completions"
RESPONSE_NAMES = ("response", "completion", "solution_str")
ROW = "row"
OTHERS_OF_BATCHES = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What other libraries pass to functions of batches, and this one has not."""


def takes_batch(function: Reward) -> bool:
    """Whether a function is called once for a batch."""
    return COMPLETIONS in _parameters(function)


def name_of(function: Reward) -> str:
    """The name of a function in metrics and messages."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return "reward" if name == "<lambda>" else str(name)


def score_function(
    rewards: Sequence[Reward],
    weights: Sequence[float] | None,
    columns: Collection[str],
    text_prompts: bool,
) -> NamedRewards | BatchRewards:
    """One function of the rewards of a run, whose weighted sum is the score.

    `columns` are those of the data set. A parameter that neither it nor the run can fill is an
    error.
    """
    names = [name_of(function) for function in rewards]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"reward: several functions are called {', '.join(doubles)}; metrics need a name for "
            "each (function.__name__)"
        )
    given = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(rewards):
        raise ConfigError(
            f"reward_weights={given}: takes one for each of the {len(rewards)} functions of reward"
        )
    for function in rewards:
        _check_parameters(function, columns)
    parts = [
        Part(name, function, weight)
        for name, function, weight in zip(names, rewards, given, strict=True)
    ]
    if any(takes_batch(part.function) for part in parts):
        return BatchRewards(parts, text_prompts)
    return NamedRewards(parts)


@dataclass(frozen=True)
class Part:
    """One of the rewards of a run."""

    name: str
    function: Reward
    weight: float

    def of_response(self, response: str, row: Mapping[str, Any]) -> Any:
        """What the function returns for a response to a row."""
        parameters = _parameters(self.function)
        offered = {
            **row,
            **{name: response for name in RESPONSE_NAMES},
            "extra_info": dict(row),
            ROW: dict(row),
        }
        named = {name: offered[name] for name in parameters if name in offered}
        first = _response_parameter(self.function, row)
        placed = [response] if first is not None else []
        if _takes_any(self.function):
            named = {**row, **named}
        return self.function(*placed, **named)

    def of_batch(
        self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]], text_prompts: bool
    ) -> Any:
        """What the function returns for a batch of responses."""
        columns = dict.fromkeys(name for row in rows for name in row)
        offered: dict[str, Any] = {
            **{name: [row.get(name) for row in rows] for name in columns},
            "prompts": [row.get("prompt") for row in rows],
            COMPLETIONS: [
                text if text_prompts else [{"role": "assistant", "content": text}]
                for text in responses
            ],
        }
        if _takes_any(self.function):
            offered.pop("prompt", None)
            return self.function(**offered)
        taken = _parameters(self.function)
        return self.function(**{name: value for name, value in offered.items() if name in taken})


class NamedRewards:
    """The score of one response: what its only reward says, or the weighted sum of several."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __call__(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Any:
        row = row_of(data_source, ground_truth, extra_info)
        returned = [part.of_response(solution_str, row) for part in self.parts]
        if any(inspect.isawaitable(value) for value in returned):
            return self._awaited(returned)
        return joined(self.parts, returned)

    async def _awaited(self, returned: Sequence[Any]) -> Any:
        return joined(self.parts, await _all(returned))


class BatchRewards:
    """The scores of a batch of responses, where a reward compares responses."""

    def __init__(self, parts: Sequence[Part], text_prompts: bool) -> None:
        self.parts = tuple(parts)
        self.text_prompts = text_prompts

    def __call__(
        self,
        data_sources: Sequence[Any],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> Any:
        rows = [
            row_of(*values) for values in zip(data_sources, ground_truths, extra_infos, strict=True)
        ]
        by_part: list[Any] = []
        for part in self.parts:
            if takes_batch(part.function):
                by_part.append(part.of_batch(solution_strs, rows, self.text_prompts))
            else:
                by_part.append(
                    [
                        part.of_response(response, row)
                        for response, row in zip(solution_strs, rows, strict=True)
                    ]
                )
        return self._joined(by_part, len(rows))

    async def _awaited(self, by_part: Sequence[Any], count: int) -> list[Any]:
        lists = [await _all(each) if isinstance(each, list) else await each for each in by_part]
        return self._rows(lists, count)

    def _joined(self, by_part: Sequence[Any], count: int) -> Any:
        waits = any(
            inspect.isawaitable(each)
            or (isinstance(each, list) and any(inspect.isawaitable(value) for value in each))
            for each in by_part
        )
        return self._awaited(by_part, count) if waits else self._rows(by_part, count)

    def _rows(self, by_part: Sequence[Any], count: int) -> list[Any]:
        for part, values in zip(self.parts, by_part, strict=True):
            if len(values) != count:
                raise RewardError(
                    f"{part.name} returned {len(values)} rewards for {count} completions"
                )
        return [joined(self.parts, [values[row] for values in by_part]) for row in range(count)]


def joined(parts: Sequence[Part], returned: Sequence[Any]) -> Any:
    """What rewards said of a response, as one score: that of a single one as it is."""
    if len(parts) == 1 and returned[0] is not None:
        return returned[0] if parts[0].weight == 1.0 else _weighted(parts, returned)
    return _weighted(parts, returned)


def _weighted(parts: Sequence[Part], returned: Sequence[Any]) -> dict[str, Any]:
    scores = [value["score"] if isinstance(value, Mapping) else value for value in returned]
    told = {part.name: score for part, score in zip(parts, scores, strict=True)}
    there = [
        part.weight * float(score)
        for part, score in zip(parts, scores, strict=True)
        if score is not None and not (isinstance(score, float) and math.isnan(score))
    ]
    if not there:
        raise RewardError(f"no reward applies: {', '.join(told)} returned None")
    return {"score": sum(there), **told}


def row_of(
    data_source: Any, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The columns of a row as rewards know them."""
    return {"data_source": data_source, "ground_truth": ground_truth, **(extra_info or {})}


async def _all(values: Sequence[Any]) -> list[Any]:
    async def one(value: Any) -> Any:
        return await value if isinstance(value, Awaitable) else value

    return list(await asyncio.gather(*map(one, values)))


# ---- Signatures


def _parameters(function: Reward) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # as of some functions that are written in C
        raise ConfigError(
            f"reward: {name_of(function)} has no signature that can be read; wrap it: "
            f"lambda response: {name_of(function)}(response)"
        ) from error


def _takes_any(function: Reward) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in _parameters(function).values())


def _response_parameter(function: Reward, columns: Collection[str]) -> str | None:
    """The first parameter, where its name says nothing else: it gets the response by place."""
    known = {*columns, *RESPONSE_NAMES, "extra_info", ROW, "prompt"}
    for name, parameter in _parameters(function).items():
        by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        return name if by_place and name not in known else None
    return None


def _check_parameters(function: Reward, columns: Collection[str]) -> None:
    batch = takes_batch(function)
    names = {*columns, "prompt", "data_source", "ground_truth"}
    names |= {COMPLETIONS, "prompts"} if batch else {*RESPONSE_NAMES, "extra_info", ROW}
    first = None if batch else _response_parameter(function, names)
    for name, parameter in _parameters(function).items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not is_needed or name in names or name == first:
            continue
        why = " (it is not available here)" if name in OTHERS_OF_BATCHES else ""
        raise ConfigError(
            f"reward: {name_of(function)} has the parameter {name!r}{why}; there are "
            f"{', '.join(sorted(names))}"
        )
