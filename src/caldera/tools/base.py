"""Texts of others, for models to read."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from caldera.errors import ConfigError, nearest
from caldera.tools.schemas import OpenAIFunctionToolSchema


def encodable(text: str) -> str:
    """The text with `?` for what no tokenizer takes: half of a surrogate pair, as JSON may hold."""
    return text.encode(errors="replace").decode()


Options = TypeVar("Options")


@dataclass
class ToolResponse:
    """What a tool answers."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        for kind in ("image", "video"):
            given = getattr(self, kind)
            if given is not None and not isinstance(given, list):
                raise ValueError(
                    f"ToolResponse.{kind} must be a list, even of one {kind}, "
                    f"got a {type(given).__name__}"
                )

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)


@dataclass(frozen=True)
class ToolLimits:
    """The limits of the calls of one tool, in each process: keys of every tool's `config`."""

    timeout: float | None = 60.0
    """Seconds that one attempt may take; None: the tool sees to it itself."""
    num_workers: int | None = None
    """Calls that run at the same time."""
    rate_limit: float | None = None
    """Calls that begin in one second."""
    attempts: int = 1
    """How often a call is tried that ends with a ConnectionError or a TimeoutError."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "attempts":
                continue
            require_positive(field.name, value, field.name in ("num_workers", "attempts"))


def require_positive(name: str, value: Any, is_count: bool = False) -> None:
    """ConfigError unless the key of a tool's `config` is a number above 0."""
    wanted = int if is_count else int | float
    if isinstance(value, bool) or not isinstance(value, wanted) or not value > 0:
        kind = "an integer" if is_count else "a number"
        raise ConfigError(f"config.{name}={value!r} must be {kind} above 0")


LIMITS = tuple(field.name for field in fields(ToolLimits))


class BaseTool(ABC):
    """Something that a model can call.

    A call makes an instance with `create`, is carried out by `execute`, and ends with `release`,
    whatever happened in between. One tool serves all trajectories of its process: what belongs to
    one of them goes by the instance, or into `agent_data.memory`.
    """

    default_limits = ToolLimits()

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self.config = dict(config)
        given = {name: config[name] for name in LIMITS if name in config}
        defaults = {name: getattr(self.default_limits, name) for name in LIMITS}
        self.limits = ToolLimits(**defaults | given)
        self.tool_schema = tool_schema
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ConfigError(f"{type(self).__name__} needs a tool_schema: it supplies none itself")
        self.tool_schema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema that the model is shown. A class with its own schema overrides this."""
        return self.tool_schema

    @property
    def schema(self) -> OpenAIFunctionToolSchema:
        """The same, which is there once the tool is made."""
        assert self.tool_schema is not None
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin a call; `create_kwargs` holds the row's arguments for this tool."""
        return instance_id or uuid.uuid4().hex, ToolResponse()

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """(the response, the reward of this call or None, metrics); `agent_data` is the
        trajectory's `ToolState`. The model gets the message of an error."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of what the instance has come to; for `execute`, nobody else calls it."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027 -- may do nothing
        """Let go of the instance."""

    async def close(self) -> None:  # noqa: B027 -- may do nothing
        """Let go of what all calls share, such as connections; the tool is not called again."""


@dataclass(frozen=True)
class NoOptions:
    """Of a tool that has the limits of every tool alone."""


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    enable_global_rate_limit: bool = True
    """False: `rate_limit` does not hold."""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_global_rate_limit, bool):
            raise ConfigError(
                f"config.enable_global_rate_limit={self.enable_global_rate_limit!r} "
                "must be true or false"
            )


class ShippedTool(BaseTool):
    """A tool that comes with Caldera: of its `config` it knows every key."""

    options_class: ClassVar[type[Any]] = NoOptions

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.options: Any = read_options(self.options_class, config, type(self).__name__)
        super().__init__(config, tool_schema)
        if isinstance(self.options, RateOptions) and not self.options.enable_global_rate_limit:
            self.limits = replace(self.limits, rate_limit=None)


def read_options(options: type[Options], config: Mapping[str, Any], tool: str) -> Options:
    """A tool's own options, a dataclass, from its `config`; a key that nothing reads is refused."""
    names = [field.name for field in fields(options)]  # type: ignore[arg-type]
    known = ["type", *LIMITS, *names]
    for key in config:
        if key not in known:
            guess = nearest(key, known)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise ConfigError(
                f"config.{key} of {tool} is unknown{hint} (known: {', '.join(known)})"
            )
    try:
        return options(**{name: config[name] for name in names if name in config})
    except TypeError as error:
        raise ConfigError(f"config of {tool}: {error}") from error
