"""The seam of agent loops: a row of the data in, the tokens of a trajectory out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from caldera.data.chat import Message, TurnAppender, render_chat, tokenize_text
from caldera.errors import RolloutError, UnsupportedError
from caldera.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.agent_loop.black_box import Session
    from caldera.agent_loop.output import Timeline
    from caldera.config import DataConfig, PPOTrainerConfig
    from caldera.interactions.base import BaseInteraction
    from caldera.tools.formats import ToolParser
    from caldera.tools.running import ToolRunner


NO_PICTURES = "agent loops take text only in this release"


@dataclass(frozen=True)
class TokenOutput:
    """The tokens sampled for one turn."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    """"stop", "length" or "abort"."""
    weight_version: int = 0


class ServerManager(Protocol):
    """Samples the turns of one trajectory. The n-th one has its own seed."""

    @property
    def timeline(self) -> Timeline:
        """The events of the trajectory, with their times. Sampling writes into it itself."""
        ...

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        """The tokens that follow `prompt_ids`, at most `max_tokens` of the parameters.

        Those take the fields of `SamplingParams`. Where nothing more fits into the model, the
        output is empty, with the stop reason "length".
        """
        ...

    def begin_session(self) -> Session:
        """A session over HTTP, in OpenAI's protocol, whose seeds follow from the row's."""
        ...


@dataclass
class AgentLoopMetrics:
    """Seconds of a trajectory, by what they were spent on."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    """How often the sampler put the trajectory off; -1 if that is not known."""


@dataclass
class AgentLoopOutput:
    """The tokens of a trajectory, and what is known of it."""

    prompt_ids: list[int]
    response_ids: list[int]
    """All tokens after the prompt: those of the policy, and environment or tool tokens."""
    response_mask: list[int]
    """1 for the tokens that the policy sampled, 0 for others."""
    response_logprobs: list[float] | None = None
    """0.0 for tokens that the policy did not sample."""
    reward_score: float | None = None
    """The reward, from a loop that knows it; nobody else scores the trajectory then."""
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Columns of the batch, such as `turn_scores` and `tool_rewards`."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(place in the response, reward) of turns, at the last token of each."""
    tool_calls: dict[str, int] = field(default_factory=dict)
    """How many calls there were, by `name/outcome`."""
    multi_modal_data: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metrics, Mapping):
            self.metrics = AgentLoopMetrics(**self.metrics)
        if self.multi_modal_data:
            raise UnsupportedError(f"multi_modal_data: {NO_PICTURES}")
        lengths = {"response_mask": len(self.response_mask)}
        if self.response_logprobs is not None:
            lengths["response_logprobs"] = len(self.response_logprobs)
        for name, length in lengths.items():
            if length != len(self.response_ids):
                raise RolloutError(
                    f"an agent loop gave {len(self.response_ids)} response_ids and {length} "
                    f"{name}: there must be one for each"
                )


@dataclass
class ResponseTokens:
    """The tokens behind the prompt of a trajectory that is under way."""

    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)

    def append(self, ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Put tokens behind the others; those without log-probs are not the policy's."""
        self.response_ids += ids
        self.response_mask += [int(log_probs is not None)] * len(ids)
        self.response_logprobs += [0.0] * len(ids) if log_probs is None else log_probs


@dataclass(frozen=True)
class Equipment:
    """The components that the loops of a process share."""

    turns: TurnAppender
    parser: ToolParser
    tools: ToolRunner | None = None
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """The run's configuration, and the equipment that follows from it."""

    config: PPOTrainerConfig
    equipment: Equipment


@dataclass(frozen=True)
class DataSettings:
    """The configuration of the data, as `dataset_config.config`."""

    config: DataConfig


class AgentLoopBase(ABC):
    """Runs one trajectory. There is an object for each of them."""

    calls_tools: ClassVar[bool] = False
    """Whether the loop calls the run's tools."""
    takes_interactions: ClassVar[bool] = False
    """Whether the loop talks to the run's interactions."""

    def __init__(
        self,
        trainer_config: RunConfig,
        server_manager: ServerManager,
        tokenizer: PreTrainedTokenizerBase,
        processor: object | None = None,
        dataset_cls: type | None = None,
        dataset_config: DataSettings | None = None,
        **kwargs: Any,
    ) -> None:
        """`kwargs` are those of the loop's entry in `agent_loop_config_path`."""
        self.config = trainer_config.config
        self.equipment = trainer_config.equipment
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.dataset_config = dataset_config
        self.loop = asyncio.get_running_loop()

    @classmethod  # noqa: B027 -- most take anything
    def check_options(cls, options: Mapping[str, Any], where: str) -> None:
        """Raise a ConfigError if the loop's entry in `agent_loop_config_path`, at `where`, cannot
        be honoured; called when the file is read."""

    @classmethod  # noqa: B027 -- most need nothing
    def check_run(cls, config: PPOTrainerConfig) -> None:
        """Raise a ConfigError if the loop lacks something; called once, when a run starts."""

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """The trajectory of a row, whose columns are the keyword arguments."""

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: object | None = None,
        videos: object | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The tokens of messages, up to where the assistant begins to respond.

        Tokens to append to sampled ones should come from `self.equipment.turns.continuation`,
        which knows how the sampled turn ended; `remove_system_prompt` is what verl offers for it.
        """
        if images or videos:
            raise UnsupportedError(f"images and videos: {NO_PICTURES}")
        ids = self.equipment.turns.prompt(messages, tools or ())
        return ids[self._system_prompt_length() :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Nothing, as messages are text."""
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            if any(part.get("type", "text") != "text" for part in parts):
                raise UnsupportedError(f"a message holds more than text: {NO_PICTURES}")
        return {}

    def _system_prompt_length(self) -> int:
        """Tokens that the template writes before the first message by itself."""
        kwargs = self.config.data.apply_chat_template_kwargs
        one, two = (
            tokenize_text(
                self.tokenizer,
                render_chat(
                    self.tokenizer, [{"role": "user", "content": ""}] * count, kwargs, False
                ),
            )
            for count in (1, 2)
        )
        return len(one) - (len(two) - len(one))


MakeLoop = Callable[..., AgentLoopBase]
"""A loop's class, or something that is called as one."""

AGENT_LOOPS: Registry[MakeLoop] = Registry(
    "agent loop (agent_name of a row, or actor_rollout_ref.rollout.agent.default_agent_loop)"
)

Loop = TypeVar("Loop", bound=type[AgentLoopBase])


def register(name: str) -> Callable[[Loop], Loop]:
    """Decorate a loop's class to have it chosen by that name."""

    def add(loop: Loop) -> Loop:
        AGENT_LOOPS.register(name)(loop)
        return loop

    return add


# ---- Which loops there are, and what they share
