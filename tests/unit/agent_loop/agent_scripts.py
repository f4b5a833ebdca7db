"""What stands for a model: a script of what it samples; and a tool that it may call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from caldera.agent_loop.base import AgentLoopOutput, Equipment, TokenOutput
from caldera.agent_loop.output import GENERATE, Timeline
from caldera.data.chat import TurnAppender
from caldera.interactions.base import BaseInteraction
from caldera.tools import function_tool
from caldera.tools.formats import Hermes
from caldera.tools.function_tool import tools_of
from caldera.tools.running import ToolRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'


@function_tool
def add(a: int, b: int) -> tuple[str, float, dict[str, str]]:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return str(a + b), 0.25, {"status": "added"}


class Script:
    """Samples what it is told to, a text a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self.prompts: list[list[int]] = []
        self.timeline = Timeline(time.perf_counter())

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        self.prompts.append(list(prompt_ids))
        with self.timeline.event(GENERATE):
            ids = self._tokenizer.encode(self._texts.pop(0), add_special_tokens=False)
        kept = ids[: sampling_params["max_tokens"]]
        log_probs = [-0.5 - 0.001 * place for place in range(len(kept))]
        return TokenOutput(kept, log_probs, "stop" if kept == ids else "length")


def equipment(
    tokenizer: PreTrainedTokenizerBase, interactions: Mapping[str, BaseInteraction] | None = None
) -> Equipment:
    tools = tools_of(sys.modules[__name__])
    return Equipment(
        TurnAppender(tokenizer), Hermes(tokenizer), ToolRunner(tools), interactions or {}
    )


Run = Callable[..., tuple[AgentLoopOutput, Script]]
