"""A teacher of grade school mathematics, that reports whether an answer is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from caldera.data.files import is_null
from caldera.errors import DataError
from caldera.interactions.base import BaseInteraction, Message, Reply, last_answer
from caldera.reward_score.gsm8k import compute_score

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Scores the number after `####`; a wrong answer may be tried again.

    The row's `interaction_kwargs` hold the `ground_truth`.
    """

    options = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        if is_null(kwargs.get("ground_truth")):
            raise DataError(
                f"the interaction {self.name!r} needs extra_info.interaction_kwargs.ground_truth "
                "in every row"
            )
        instance_id = await super().start_interaction(instance_id)
        self._truths[instance_id] = kwargs["ground_truth"]
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[Message], **kwargs: Any
    ) -> Reply:
        score = compute_score(last_answer(messages), self._truths[instance_id])
        self._scores[instance_id] = score
        is_right = score == 1.0
        return is_right, RIGHT if is_right else WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores.get(instance_id, 0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._truths.pop(instance_id, None)
        self._scores.pop(instance_id, None)
