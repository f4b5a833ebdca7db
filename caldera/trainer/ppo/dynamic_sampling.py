"""Dynamic sampling: prompts whose answers are all alike teach nothing and are replaced (DAPO)."""

from __future__ import annotations

import logging

import numpy as np
import torch

from caldera.config import PPOTrainerConfig
from caldera.errors import ConfigError, DataError
from caldera.protocol import DataProto, tensors_of

logger = logging.getLogger(__name__)

METRICS_OF_REWARD = ("score", "seq_reward", "seq_final_reward")
"""Names for the sum of a sample's scores; any other name is a value that the scorer returned."""


class GroupFilter:
    """Collects scored batches until there are enough prompts whose answers differ.

    Without `algorithm.filter_groups` the first batch is enough, and is handed back as it is.
    """

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._settings = config.algorithm.filter_groups
        self._wanted = config.data.train_batch_size  # prompts
        self._rows_a_prompt = config.actor_rollout_ref.rollout.n
        self._kept: list[DataProto] = []
        self._prompts_kept = 0
        self._prompts_seen = 0

    @property
    def batches(self) -> int:
        """How many batches have been sampled for this step."""
        return len(self._kept)

    @property
    def enough(self) -> bool:
        if self.batches == 0 or not self._settings.enable:
            return self.batches > 0
        return self._prompts_kept >= self._wanted

    def add(self, batch: DataProto) -> None:
        """Keep the groups of a scored batch that are informative."""
        if not self._settings.enable:
            self._kept.append(batch)
            return
        rows = informative_rows(batch, str(self._settings.metric))
        self._kept.append(batch.select_idxs(rows))
        self._prompts_kept += int(rows.sum()) // self._rows_a_prompt
        self._prompts_seen += len(batch) // self._rows_a_prompt
        most = self._settings.max_num_gen_batches
        if not self.enough and most and self.batches >= most:
            raise DataError(
                f"algorithm.filter_groups.max_num_gen_batches={most} batches were sampled, and "
                f"only {self._prompts_kept} of the {self._wanted} prompts that a step needs have "
                f"answers that differ in {self._settings.metric!r}: the prompts may be too hard "
                "or too easy, or data.gen_batch_size too small"
            )
        if not self.enough:
            logger.info(
                "dynamic sampling: %d of %d prompts after %d batches",
                self._prompts_kept, self._wanted, self.batches,
            )  # fmt: skip

    def take(self) -> tuple[DataProto, dict[str, float]]:
        """(the batch of a step, metrics); prompts beyond the wanted number are dropped."""
        if not self._settings.enable:
            return self._kept[0], {}
        metrics = {
            "training/num_gen_batches": float(self.batches),
            "training/filter_groups/kept_ratio": self._prompts_kept / self._prompts_seen,
            "training/filter_groups/evicted_samples": float(
                (self._prompts_seen - self._prompts_kept) * self._rows_a_prompt
            ),
        }
        whole = DataProto.concat([part for part in self._kept if len(part)])
        return whole[: self._wanted * self._rows_a_prompt], metrics


def informative_rows(batch: DataProto, metric: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows belong to a group whose values differ, or that has one member."""
    values = _values(batch, metric)
    uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
    by_uid: dict[str, list[float]] = {}
    for uid, value in zip(uids, values, strict=True):
        by_uid.setdefault(uid, []).append(value)
    kept = {uid: len(group) == 1 or len(set(group)) > 1 for uid, group in by_uid.items()}
    return np.array([kept[uid] for uid in uids], dtype=bool)


def _values(batch: DataProto, metric: str) -> list[float]:
    if metric in batch.non_tensor_batch:
        return [float(value) for value in batch.non_tensor_batch[metric]]
    if metric in METRICS_OF_REWARD:
        scores: torch.Tensor = tensors_of(batch)["token_level_scores"]
        return [float(score) for score in scores.sum(-1)]
    said = ", ".join(sorted(batch.non_tensor_batch.keys() - {"uid"}))
    raise ConfigError(
        f"algorithm.filter_groups.metric={metric!r}: takes {', '.join(METRICS_OF_REWARD)}, or a "
        f"value of the scorer's; the rows have {said}"
    )
