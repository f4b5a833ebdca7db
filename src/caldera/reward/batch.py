"""The reward manager of score functions that take a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from caldera.errors import RewardError
from caldera.protocol import DataProto
from caldera.reward.explaining import no_exit
from caldera.reward.manager import REWARD_MANAGERS, NaiveRewardManager, RewardResult
from caldera.reward.samples import Outcome, Pending, failure
from caldera.reward.scoring import attempt

__all__ = ["BatchRewardManager"]


@REWARD_MANAGERS.register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) once.

    It returns a list with what the naive manager's function would return of each sample. The time
    limit is that of the one call; whatever it raises, no sample of the batch has a score.
    """

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | RewardResult:
        return super().__call__(data, return_dict)  # a separate batch: it knows whole batches alone

    def keywords(self) -> list[str]:
        named = ["data_sources", "solution_strs", "ground_truths", "extra_infos"]
        return [*named, *self.reward_kwargs]

    def _outcomes(self, data: DataProto, known: Sequence[Outcome | None]) -> list[Outcome]:
        samples = [self._sample(data, row) for row in range(len(data))]
        arguments = {
            "data_sources": [sample.data_source for sample in samples],
            "solution_strs": [sample.response for sample in samples],
            "ground_truths": [sample.ground_truth for sample in samples],
            "extra_infos": [sample.extra_info for sample in samples],
            **self.reward_kwargs,
        }
        whole = self._scoring.submit(arguments, f"a batch of {len(samples)} samples")
        if (error := whole.exception()) is not None:
            return [failure(error)] * len(samples)
        with no_exit():
            listed = attempt(_one_a_sample, whole.result(), len(samples))
        if (error := listed.exception()) is not None:
            return [failure(error)] * len(samples)
        return [
            self.outcome(Pending(sample, attempt(lambda value=value: value)))
            for sample, value in zip(samples, listed.result(), strict=True)
        ]


def _one_a_sample(returned: Any, count: int) -> list[Any]:
    if not isinstance(returned, Sequence | np.ndarray | torch.Tensor) or isinstance(returned, str):
        raise RewardError(
            f"the score function must return a list of {count} scores, and returned a "
            f"{type(returned).__name__}"
        )
    if len(returned) != count:
        raise RewardError(f"the score function returned {len(returned)} scores for {count} samples")
    return list(returned)
