"""Score functions of the user's own, plain or async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from caldera.config.reward import CustomRewardFunctionConfig
from caldera.data.importing import load_object
from caldera.errors import ConfigError
from caldera.reward.explaining import guard_exit

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
        guard_exit()
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
        self._check_binds((), keywords, f"the keywords {', '.join(keywords)}")

    def check_call_by_place(self, names: Sequence[str]) -> None:
        """The function can be called with so many arguments, in this order, and its
        `reward_kwargs`."""
        more = "".join(f", {name}=..." for name in self.reward_kwargs)
        self._check_binds(names, self.reward_kwargs, f"the arguments {', '.join(names)}{more}")

    def _check_binds(self, args: Sequence[Any], kwargs: Mapping[str, Any], shown: str) -> None:
        try:
            # A decorator may take other arguments than what it decorates.
            signature = inspect.signature(self.function, follow_wrapped=False)
        except ValueError:  # as of some functions that are written in C
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"custom_reward_function.name={self.name!r}: {self.path} has "
                f"{self.name}{signature}, which cannot be called with {shown}: {error}"
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


def get_custom_reward_fn(
    config: CustomRewardFunctionConfig, custom: Mapping[str, Any] | None = None
) -> CustomScore | None:
    """The function that the configuration names, or None if it names none.

    Its `reward_kwargs` override the arguments of every call. A function with a parameter `custom`
    gets the keys of `custom`.
    """
    if config.path is None:
        return None
    score = CustomScore(config.path, config.name, dict(config.reward_kwargs))
    offered = named_arguments(score, {"custom": lambda: dict(custom or {})})
    score.reward_kwargs = offered | score.reward_kwargs
    return score
