"""Score functions of the user's own, plain or async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from caldera.config.reward import CustomRewardFunctionConfig
from caldera.data.importing import load_object
from caldera.errors import ConfigError

__all__ = ["CustomScore", "ScoreFunction", "get_custom_reward_fn", "named_arguments"]

ScoreFunction = Callable[..., Any]
"""`compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`; returns a
number or a dict with `score`, or is an async function that does."""


@dataclass
class CustomScore:
    """A function of a file or package, which another process finds there again."""

    path: str
    name: str
    reward_kwargs: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def function(self) -> ScoreFunction:
        function = load_object(self.path, self.name, "custom_reward_function")
        if not callable(function):
            raise ConfigError(
                f"custom_reward_function.name={self.name!r} in {self.path} must be a function, "
                f"got {type(function).__name__}"
            )
        loaded: ScoreFunction = function
        return loaded

    def check_call(self, names: Collection[str]) -> None:
        """The function can be called with these keywords and its `reward_kwargs`."""
        keywords = dict.fromkeys([*names, *self.reward_kwargs])
        try:
            # A decorator may take other arguments than what it decorates.
            signature = inspect.signature(self.function, follow_wrapped=False)
        except ValueError:  # as of some functions that are written in C
            return
        try:
            signature.bind(**keywords)
        except TypeError as error:
            raise ConfigError(
                f"custom_reward_function.name={self.name!r}: {self.path} has "
                f"{self.name}{signature}, which cannot be called with the keywords "
                f"{', '.join(keywords)}: {error}"
            ) from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **(kwargs | self.reward_kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.name, self.reward_kwargs)


def named_arguments(
    function: ScoreFunction, offered: Mapping[str, Callable[[], Any]], or_any: bool = False
) -> dict[str, Any]:
    """Those of the offered arguments that a function has by name; no others are made.

    With `or_any` a function that takes any keyword takes all of them.
    """
    own = function.function if isinstance(function, CustomScore) else function
    try:
        taken = inspect.signature(own).parameters
    except ValueError:  # as of some functions that are written in C
        return {}
    takes_any = or_any and any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return {name: make() for name, make in offered.items() if takes_any or name in taken}


def get_custom_reward_fn(config: CustomRewardFunctionConfig) -> CustomScore | None:
    """The function that the configuration names, or None if it names none.

    Its `reward_kwargs` override the arguments of every call.
    """
    if config.path is None:
        return None
    score = CustomScore(config.path, config.name, dict(config.reward_kwargs))
    _ = score.function  # a mistake in the name is found at once
    return score
