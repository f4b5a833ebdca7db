"""Lets a model ask whether its answer to a problem of GSM8K is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caldera.data.files import is_null
from caldera.reward_score.gsm8k import compute_score
from caldera.tools.base import ShippedTool, ToolResponse
from caldera.tools.schemas import OpenAIFunctionToolSchema

NOT_IMPROVED = -0.05


class Gsm8kTool(ShippedTool):
    """Scores an answer. One that is no better than those before it costs a little.

    The row gives the right one: `tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`.
    """

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._instances: dict[str, tuple[str, str]] = {}  # the right answer, the last one given

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.of_text(
            "calc_gsm8k_reward",
            "Says whether an answer is right: the reward is 1.0 then.",
            "answer",
            "The answer, a number.",
        )

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance, response = await super().create(instance_id, **kwargs)
        truth = (kwargs.get("create_kwargs") or kwargs).get("ground_truth")
        if is_null(truth):
            raise ValueError(f"the row has no tools_kwargs.{self.name}.create_kwargs.ground_truth")
        self._instances[instance] = (str(truth), "")
        return instance, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        answer = parameters["answer"]
        truth, _ = self._instances[instance_id]
        self._instances[instance_id] = (truth, answer)
        reward = await self.calc_reward(instance_id)
        state = kwargs.get("agent_data")
        memory: dict[str, Any] = {} if state is None else state.memory
        best = memory.get(self.name, 0.0)
        memory[self.name] = max(best, reward)
        told = f"Current parsed answer={answer!r} reward={reward}"
        return ToolResponse(told), 0.0 if reward > best else NOT_IMPROVED, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        truth, answer = self._instances[instance_id]
        said = answer if answer.startswith("#### ") else f"#### {answer}"
        return compute_score(said, truth)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)
